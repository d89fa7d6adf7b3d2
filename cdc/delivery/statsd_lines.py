"""The format of the delivery `statsd`: a change becomes one line for each metric that it changes.

It is not one of the formats that a definition can choose: a line contains no row, only the value of one column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Final, Self

import numpy as np
import pyarrow as pa

from cdc.config.destinations import StatsdDelivery, StatsdMetric
from cdc.delivery.formats.contract import EncodedEvents, LogicalMessages
from cdc.delivery.formats.table_changes import TableChanges
from cdc.delivery.row_condition import RowCondition
from cdc.errors import TransformFailed
from cdc.table import TableSchema, matches

_NUMERIC_TYPES: Final = frozenset({20, 21, 23, 26, 700, 701, 1700})
"""OIDs of types whose text is a number."""
_KINDS: Final = {"counter": "c", "gauge": "g"}


@dataclass(frozen=True, slots=True)
class _TableMetric:
    """A metric of one version of one table."""

    metric: StatsdMetric
    condition: RowCondition | None
    column: int | None
    """Identifier of the column with the value."""


class StatsdFormat:
    """Encodes changes as lines of StatsD. Raises TransformFailed if a metric does not fit its table."""

    def __init__(self, metrics: Sequence[StatsdMetric]) -> None:
        self._metrics = metrics
        self._tables: dict[int, tuple[TableSchema, list[_TableMetric]]] = {}

    @classmethod
    def of(cls, settings: StatsdDelivery) -> Self:
        """Return the format of a delivery."""
        return cls(settings.metrics)

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Return the lines of each change; the id of an event ends with the name of its metric."""
        found = sorted(
            (change, order, line, one.metric.metric)
            for order, one in enumerate(self._of_table(changes.schema))
            for change, line in _lines(one, changes)
        )
        return EncodedEvents(
            source=np.array([change for change, *_ in found], dtype=np.int64),
            suffixes=[f"/{order}/{metric}" for _, order, _, metric in found],
            keys=pa.array([metric for *_, metric in found], pa.string()),
            values=pa.array([line for _, _, line, _ in found], pa.string()),
        )

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Return nothing: metrics are made from rows."""
        del messages
        nothing = pa.array([], pa.string())
        return EncodedEvents(source=np.empty(0, np.int64), keys=nothing, values=nothing)

    def _of_table(self, schema: TableSchema) -> list[_TableMetric]:
        known = self._tables.get(schema.relation)
        if known is not None and known[0] == schema:
            return known[1]
        made = [_table_metric(one, schema) for one in self._metrics if matches(schema.topic, (one.table,))]
        self._tables[schema.relation] = schema, made
        return made


def _table_metric(metric: StatsdMetric, schema: TableSchema) -> _TableMetric:
    column = None if metric.value is None else schema.column(metric.value)
    if metric.value is not None and (column is None or column.generated):
        raise TransformFailed(
            f"table {schema.topic!r} has no column {metric.value!r}, which metric {metric.metric!r} names"
        )
    if column is not None and column.value_type[0] not in _NUMERIC_TYPES:
        raise TransformFailed(
            f"column {column.name!r} of table {schema.topic!r}, which metric {metric.metric!r} names, is no number"
        )
    condition = None if metric.when is None else RowCondition(metric.when, schema)
    return _TableMetric(metric, condition, None if column is None else column.id)


def _lines(one: _TableMetric, changes: TableChanges) -> Iterator[tuple[int, str]]:
    """Yield the index of each change that counts, and its line."""
    kept = range(changes.count) if one.condition is None else one.condition.matches(changes).kept.tolist()
    kind = _KINDS[one.metric.type]
    if one.column is None:
        yield from ((change, f"{one.metric.metric}:1|{kind}") for change in kept)
        return
    texts = changes.after.columns[one.column].texts
    for change in kept:
        text = texts[change].as_py()
        # StatsD has neither NaN nor infinity
        if text is not None and Decimal(text).is_finite():
            yield change, f"{one.metric.metric}:{Decimal(text):f}|{kind}"
