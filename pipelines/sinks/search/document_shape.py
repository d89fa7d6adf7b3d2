"""Document shape: the columns and masks that a search sink's rules give to the documents of one table.

Column lists, `fields` and the rule's transform act before anything is written. So the values of hidden columns, and the
plain values of masked ones, reach neither the index nor its parked rows. A column keeps its id from the source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa

from cdc.config import SearchRule, SearchSettings, rule_of, search_settings
from cdc.config.search_sink import search_fingerprint, with_document_columns
from cdc.config.sink_rules import check_named, with_selected_columns
from cdc.errors import TransformFailed
from cdc.table import Column, TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from cdc.targets.column_mask import Mask
from cdc.targets.dead_letter_rows import Image
from cdc.targets.hidden_columns import check_hidden, document_rules
from pipelines.transform.table_transform import TableTransform, rename_columns
from pipelines.types import Policy, TypePolicy
from pipelines.types.typed_rows import target_schema, text_columns, typed_rows

_NO_MASKS: Final[Mapping[int, Mask]] = {}
_TEXT_OID: Final = 25


@dataclass(frozen=True, slots=True)
class DocumentShape:
    """The columns of the documents of one table, and the masks of their values."""

    schema: TableSchema
    """The source table after the selection of columns, and after the drops, renames and masks of the transform."""
    columns: tuple[Column, ...]
    """The columns of a document. They are `schema.sent`, unless the rule has a Python function."""
    fingerprint: str
    """Hash of the settings and the transform, keyed with the transform's salt."""
    policy: Policy = TypePolicy.TEXT
    """How `rows` converts Postgres types; also the types of the rows that the Python function of the rule gets."""
    transform: TableTransform | None = None

    @property
    def masks(self) -> Mapping[int, Mask]:
        """Column id → mask. It may have ids of columns that `fields` leaves out."""
        return _NO_MASKS if self.transform is None else self.transform.masks

    @property
    def needs_complete_rows(self) -> bool:
        """Whether a Python function of the rule computes the rows.

        Such a function needs complete images, and it can hide values that `image` and `parked_image` show.
        """
        return self.transform is not None and self.transform.rule.python is not None

    @property
    def missing(self) -> dict[int, str | None]:
        """Column id → masked text of the value that the column has in rows older than the column."""
        if self.transform is None:
            return {column.id: column.missing for column in self.columns}
        return {column.id: self.transform.missing(column) for column in self.columns}

    def rows(self, images: pa.Table) -> pa.Table:
        """Convert folded upserts to masked, typed rows: `columns` under their escaped names, `_position`, `_ordinal`.

        An unsent column of a partial image has a placeholder; see pipelines.types.typed_rows. Raises
        ValueNotRepresentable for a value that does not fit its type, and TransformFailed as TableTransform.rows does.
        """
        if self.transform is None:
            return typed_rows(images, self.schema, self.policy)
        return self.transform.rows(images, self.policy)

    def texts(self, images: pa.Table) -> list[pa.Array]:
        """Return, for each of `columns`, the masked texts of folded upserts, with placeholders as in `rows`."""
        if self.needs_complete_rows:
            rows = self.rows(images)
            return [_as_text(rows[column_name(column.name)], self.schema.topic) for column in self.columns]
        masks = self.masks
        return [
            masks[column.id](texts) if column.id in masks else texts
            for column, texts in zip(self.columns, text_columns(images, self.schema), strict=True)
        ]

    def image(self, image: Image) -> dict[int, str | None]:
        """Return a row image without the columns that documents do not have, and with masked values.

        A value that `parked_image` has masked is not masked twice.
        """
        masks = self.masks
        own = self._own_columns(image)
        return {column: masks[column].of_text(text) if column in masks else text for column, text in own.items()}

    def parked_image(self, image: Image) -> dict[int, str | None]:
        """Do the same as `image`, but mark masked values, so that they are not masked again when the row is retried.

        See pipelines.sinks.contract.ParkingSink.image_mask.
        """
        masks = self.masks
        own = self._own_columns(image)
        return {column: masks[column].over(text) if column in masks else text for column, text in own.items()}

    def _own_columns(self, image: Image) -> dict[int, str | None]:
        known = {column.id for column in self.columns}
        return {column: text for column, text in image.items() if column in known}


def _text_policy(_topic: str) -> Policy:
    return TypePolicy.TEXT


@dataclass(frozen=True, slots=True)
class DocumentShapes:
    """The document shapes of one search sink. A shape is computed once per version of a source table.

    Any thread may use an instance.
    """

    settings: SearchSettings = field(default_factory=SearchSettings)
    """The settings of the sink as a whole."""
    rules: Sequence[SearchRule] = ()
    policy_of: Callable[[str], Policy] = _text_policy
    """Function that returns the type policy of a topic, with the columns' names at the source."""

    _known: dict[TableSchema, DocumentShape] = field(default_factory=dict, init=False, repr=False, compare=False)

    def of(self, schema: TableSchema) -> DocumentShape:
        """Return the shape of a table's documents.

        Raises SchemaNotApplicable if the settings leave out a column of the key, and TransformFailed for a transform
        that does not fit the table: among others, one that masks or drops a column of the key. Raises
        HiddenColumnRenamed if the rule would show a column that it hid under another name.
        """
        found = self._known.get(schema)
        if found is None:
            found = self._known[schema] = self._shape(schema)
        return found

    def parks_rows(self, schema: TableSchema) -> bool:
        """Return whether rows of a table may be parked: not without a key, and not with a transform in Python.

        A row is parked before the Python function changes it. So a parked row could show values that the function
        hides.
        """
        rule = rule_of(schema.topic, self.rules)
        has_function = rule is not None and rule.transform is not None and rule.transform.python is not None
        return bool(schema.key) and not has_function

    def check_named(self, schema: TableSchema) -> None:
        """Raise SchemaNotApplicable if the rule of a table names a column that the table does not have."""
        check_named(schema, rule_of(schema.topic, self.rules))

    def _shape(self, schema: TableSchema) -> DocumentShape:
        check_hidden(schema, document_rules(self.settings, self.rules))
        rule, settings = rule_of(schema.topic, self.rules), search_settings(schema.topic, self.settings, self.rules)
        fingerprint = search_fingerprint(schema.topic, self.settings, self.rules)
        policy, selected = self.policy_of(schema.topic), with_selected_columns(schema, settings)
        indexed = {column.id for column in with_document_columns(schema, settings).columns}
        if rule is None or rule.transform is None:
            own = _only(selected, indexed)
            return DocumentShape(own, own.sent, fingerprint, policy)
        if rule.transform.needs_spark:
            raise TransformFailed(
                f"the rule of table {schema.topic!r} has 'computed' or 'where', which a search sink cannot apply"
            )
        policy, whole = rename_columns(policy, rule.transform.rename), TableTransform.of(rule.transform, selected)
        transform = replace(whole, schema=_only(whole.schema, indexed))
        columns = transform.schema.sent if rule.transform.python is None else _returned_columns(transform, policy)
        return DocumentShape(transform.schema, columns, fingerprint, policy, transform)


def _only(schema: TableSchema, ids: set[int]) -> TableSchema:
    return replace(schema, columns=tuple(column for column in schema.columns if column.id in ids))


def _returned_columns(transform: TableTransform, policy: Policy) -> tuple[Column, ...]:
    """Return the columns that the Python function of a rule returns; a column that it adds has a negative id."""
    given = target_schema(transform.schema, policy).names
    source = dict(zip(given, transform.schema.sent, strict=False))  # the last two names are position and ordinal
    returned = transform.row_schema(policy).names
    return tuple(
        source[name] if name in source else Column(id=_added_id(name), name=name, type_oid=_TEXT_OID, type_name="text")
        for name in returned
        if name not in {POSITION_COLUMN, ORDINAL_COLUMN}
    )


def _added_id(name: str) -> int:
    """Return an id that depends on the name alone, so that stored documents keep their meaning."""
    return -1 - int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])


def _as_text(values: pa.ChunkedArray, topic: str) -> pa.Array:
    try:
        texts = values.cast(pa.string())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        texts = None
    # raised outside of the handler, because Arrow's message may contain a value
    if texts is None:
        raise TransformFailed(
            f"the function of the rule of table {topic!r} returned a column of type {values.type}, "
            "which cannot be stored as text"
        )
    return texts.combine_chunks()
