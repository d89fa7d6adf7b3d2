"""Routes: which changes of a table a delivery sends, under which topic, key and headers, with which columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from string import Formatter
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Transform
from cdc.config.deliveries import DeliveryRule, DeliverySettings
from cdc.delivery.formats.contract import Headers
from cdc.delivery.formats.table_changes import Image, TableChanges, table_changes
from cdc.delivery.row_condition import RowCondition
from cdc.errors import CdcError, EventNotEncodable, TransformFailed
from cdc.json_arrays import concatenated
from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.table import Column, ReplicaIdentity, TableSchema, matches
from cdc.targets.column_mask import Mask, transformed_columns
from cdc.targets.hidden_columns import IN_DELIVERY, check_hidden, event_rules

_SENT: Final = pa.array(sorted(one.value for one in (*ROW_OPERATIONS, Operation.TRUNCATE)))
"""Operations of rows that have events; `s` and `g` rows have none."""


@dataclass(frozen=True, slots=True)
class RoutedChanges:
    """Changes of one table and one topic."""

    indices: np.ndarray
    """Index of each change in the rows that were routed."""
    changes: TableChanges
    headers: list[Headers] | None
    """Additional headers of each change; None if the rule adds none."""
    refusal: CdcError | None = None
    """Reason for which none of the changes can be sent."""

    def key(self, number: int) -> tuple[str | None, ...]:
        """Return the texts of the key of a change, by which events stay in order."""
        return tuple(part[number].as_py() for part in self.changes.key)


class TableRoute:
    """The route of one version of one table.

    Raises TransformFailed if the rule of the delivery does not fit the table, HiddenColumnRenamed if it would show a
    column that it hid under another name.
    """

    def __init__(self, schema: TableSchema, settings: DeliverySettings, pipeline: str) -> None:
        check_hidden(schema, event_rules(settings), IN_DELIVERY)
        rule = next((rule for rule in settings.rules if matches(schema.topic, (rule.match,))), None)
        rule = rule or DeliveryRule.model_construct(match=schema.topic)
        self._source = schema
        self._schema, self._masks = transformed_columns(rule.transform or Transform(), schema)
        self._condition = None if rule.when is None else RowCondition(rule.when, schema)
        self._key = tuple(self._column(name) for name in rule.key)
        if self._key:
            self._schema = _with_key(self._schema, [column.id for column in self._key])
        self._headers = {name: self._column(column) for name, column in rule.headers.items()}
        known = {"pipeline": pipeline, "schema": schema.schema, "table": schema.name}
        self._topic: list[str | Column] = []
        for text, name, _, _ in Formatter().parse(rule.topic or settings.topic):
            self._topic.append(text)
            if name is not None:
                self._topic.append(known[name] if name in known else self._column(name))
        of_topic = [piece for piece in self._topic if isinstance(piece, Column)]
        self._routing = tuple(dict.fromkeys((*of_topic, *self._key, *self._headers.values())))

    @property
    def topic(self) -> str | None:
        """The topic of all events; None if it depends on the row."""
        return None if any(isinstance(piece, Column) for piece in self._topic) else "".join(map(str, self._topic))

    @property
    def unsent_by_deletes(self) -> tuple[str, ...]:
        """Names of the columns in topic, key and headers that a delete does not contain; none if the rule's condition
        is true for no delete.
        """
        if self._source.replica_identity is ReplicaIdentity.FULL:
            return ()
        if self._condition is not None and not self._condition.can_match_deletes:
            return ()
        return tuple(column.name for column in self._routing if column.key is None)

    def routed(self, rows: pa.Table) -> Iterator[RoutedChanges]:
        """Yield the changes of each topic. rows: log rows of this table under this version of its schema."""
        kept = np.flatnonzero(pc.is_in(rows["op"], _SENT).to_numpy(zero_copy_only=False))
        if len(kept) < rows.num_rows:
            rows = rows.take(pa.array(kept))
        if self._condition is not None and rows.num_rows:
            found = self._condition.matches(table_changes(self._source, "", rows))
            yield from self._by_topic(rows.take(pa.array(found.failed)), kept[found.failed], self._condition.refusal())
            rows, kept = rows.take(pa.array(found.kept)), kept[found.kept]
        yield from self._by_topic(rows, kept)

    def _by_topic(
        self, rows: pa.Table, indices: np.ndarray, refusal: CdcError | None = None
    ) -> Iterator[RoutedChanges]:
        """Yield the changes of each topic; refusal: why none of them can be sent."""
        if self._routing and rows.num_rows:
            is_routable = self._is_routable(table_changes(self._source, "", rows))
            lost = np.flatnonzero(~is_routable)
            if len(lost):
                changes = table_changes(self._source, "", rows.take(pa.array(lost)))
                yield RoutedChanges(indices[lost], changes, None, self._unroutable())
                rows, indices = rows.take(pa.array(np.flatnonzero(is_routable))), indices[is_routable]
        if not rows.num_rows:
            return
        if self.topic is not None:
            yield replace(self._changes(self.topic, rows, indices), refusal=refusal)
            return
        topics = self._row_topics(table_changes(self._source, "", rows)).dictionary_encode()
        for number, topic in enumerate(topics.dictionary.to_pylist()):
            chosen = np.flatnonzero(topics.indices.to_numpy() == number)
            yield replace(self._changes(topic, rows.take(pa.array(chosen)), indices[chosen]), refusal=refusal)

    def _is_routable(self, changes: TableChanges) -> np.ndarray:
        """Return for each change whether the log has the value of every column in topic, key and headers."""
        is_routable = pc.equal(changes.array("op"), Operation.TRUNCATE.value).to_numpy(zero_copy_only=False)
        known = [
            _is_sent(changes.after, one) | _is_sent(changes.before, one) for one in self._routing if one.key is None
        ]
        return is_routable | np.logical_and.reduce([np.ones(changes.count, dtype=bool), *known])

    def _unroutable(self) -> CdcError:
        names = ", ".join(repr(column.name) for column in self._routing if column.key is None)
        return EventNotEncodable(
            f"a change of table {self._source.topic!r} does not contain a column that the topic, key or headers of its "
            f"event need: {names}",
            remedy="name only columns of the key in the rule of the delivery, then run 'cdc dlq retry SINK'; for later "
            "changes, run ALTER TABLE … REPLICA IDENTITY FULL at the source",
        )

    def _changes(self, topic: str, rows: pa.Table, indices: np.ndarray) -> RoutedChanges:
        changes = table_changes(self._source, topic, rows)
        headers = self._row_headers(changes)
        key = tuple(_latest_text(changes, column) for column in self._key) or changes.key
        changes = replace(
            changes,
            schema=self._schema,
            before=_masked(changes.before, self._masks),
            after=_masked(changes.after, self._masks),
            key=key,
            old_key=tuple(pa.nulls(changes.count, pa.string()) for _ in key) if self._key else changes.old_key,
        )
        return RoutedChanges(indices, changes, headers)

    def _row_topics(self, changes: TableChanges) -> pa.StringArray:
        pieces = [
            piece if isinstance(piece, str) else pc.fill_null(_latest_text(changes, piece), "") for piece in self._topic
        ]
        return concatenated(pieces)

    def _row_headers(self, changes: TableChanges) -> list[Headers] | None:
        if not self._headers:
            return None
        texts = [_latest_text(changes, column).to_pylist() for column in self._headers.values()]
        return [
            tuple((name, value.encode()) for name, value in zip(self._headers, row, strict=True) if value is not None)
            for row in zip(*texts, strict=True)
        ]

    def _column(self, name: str) -> Column:
        """Return a column that topic, key or headers contain, and that no mask hides."""
        column = self._source.column(name)
        if column is None or column.generated:
            raise TransformFailed(
                f"table {self._source.topic!r} has no column {name!r}, which a rule of a delivery names"
            )
        if column.id in self._masks:
            raise TransformFailed(
                f"column {name!r} of table {self._source.topic!r} is masked, so it cannot be in a topic, key or header"
            )
        return column


def _with_key(schema: TableSchema, ids: list[int]) -> TableSchema:
    columns = (replace(one, key=ids.index(one.id) if one.id in ids else None) for one in schema.columns)
    return replace(schema, columns=tuple(columns))


def _latest_text(changes: TableChanges, column: Column) -> pa.StringArray:
    """Return the text of a column after each change; of a delete, before it. A value that was not sent did not change,
    so it is that before the change or, if that was not sent either, that of the key, or null.
    """
    after, before = changes.after.columns[column.id], changes.before.columns[column.id]
    is_after = _is_sent(changes.after, column)
    found = pc.if_else(pa.array(is_after), after.texts, before.texts)
    if column.key is None:
        return found
    is_known = is_after | _is_sent(changes.before, column)
    return pc.if_else(pa.array(is_known), found, changes.key[column.key])


def _is_sent(image: Image, column: Column) -> np.ndarray:
    unsent = image.columns[column.id].unsent
    return image.exists if unsent is None else image.exists & ~unsent


def _masked(image: Image, masks: Mapping[int, Mask]) -> Image:
    if not masks:
        return image
    columns = {
        number: replace(column, texts=masks[number](column.texts)) if number in masks else column
        for number, column in image.columns.items()
    }
    return Image(image.exists, columns)
