"""Reading of Delta sinks: their published cuts, parked rows and rules, and the rows of their tables."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.errors import SinkUnavailable
from cdc.target_names import POSITION_COLUMN, column_name
from cdc.targets.current_rows import APPEND, CurrentRows, quote_identifier, quote_literal
from cdc.targets.dead_letter_rows import read_parked
from cdc.targets.lake_reader import Lake
from cdc.targets.path_ownership import is_begun
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.sink_reading import ParkedState, ReadableTable, RuleFinding, UnreadableTable, refusal_reason

if TYPE_CHECKING:
    from cdc.postgres.key_range_digests import KeyRange

_BOUNDS: Final = ((">=", "first"), ("<", "ended"))


class DeltaReading:
    """How the targets of Delta sinks are read."""

    def is_begun(self, sink: DeltaSinkDefinition) -> bool:
        """See SinkReading.is_begun."""
        return is_begun(sink)

    def published(self, sink: DeltaSinkDefinition) -> Published | None:
        """See SinkReading.published."""
        return Lake.of(sink).published()

    def parked(self, sink: DeltaSinkDefinition) -> ParkedState:
        """See SinkReading.parked."""
        record = Lake.of(sink).published()
        return ParkedState(record, [] if record is None else read_parked(sink.record_uri, record))

    def check_rules(self, sink: DeltaSinkDefinition, relation: int) -> None:
        """See SinkReading.check_rules."""
        Lake.of(sink).check_rules(relation)

    def rule_findings(self, sink: DeltaSinkDefinition) -> Iterator[RuleFinding]:
        """See SinkReading.rule_findings. A sink that cannot be read is a finding as well."""
        try:
            differing = Lake.of(sink).differences()
        except SinkUnavailable as exc:
            yield RuleFinding(f"sink {sink.name}", None, exc, exc.message, stops=True)
            return
        for topic, error in differing:
            yield RuleFinding(topic, topic, error, f"sink {sink.name!r}: {error.message}", stops=True)

    def published_state(self, sink: DeltaSinkDefinition) -> PublishedVersions:
        """See SinkReading.published_state."""
        return PublishedVersions(Lake.of(sink).published())

    def table_at_cut(
        self,
        sink: DeltaSinkDefinition,  # noqa: ARG002 - the record says where the target is
        handle: str,
        record: TableRecord,
        key: Sequence[str],
    ) -> ReadableTable:
        """See SinkReading.table_at_cut."""
        return open_table(record, json.loads(handle).get(record.target, record.version), key)


class PublishedVersions:
    """The versions of the targets of a Delta sink that its published record names."""

    def __init__(self, record: Published | None) -> None:
        self.record = record

    @property
    def has_newer_versions(self) -> bool:
        """See PublishedTargets.has_newer_versions."""
        return True

    def table(self, record: TableRecord, key: Sequence[str], *, newest: bool) -> ReadableTable:
        """See PublishedTargets.table."""
        versions = {} if newest or self.record is None else self.record.versions
        return open_table(record, versions.get(record.target), key)


class TableAtVersion:
    """A table in a Delta target at one version; the target may contain other tables as well."""

    reads_ranges = True

    def __init__(self, record: TableRecord, version: int | None, key: Sequence[str]) -> None:
        """record: the published record of the table. version: version of the target, None for the newest. key: names of
        the key columns.
        """
        self._table = CurrentRows(record.target, version, record.relation)
        self._key = [column_name(name) for name in key]

    @property
    def refusal(self) -> str | None:
        """See ReadableTable.refusal."""
        if self._table.unread is not None:
            return f"delta-rs cannot read the target: {self._table.unread}"
        if not self._table.known:
            return f"the target has the unknown history mode {self._table.mode!r}, so its current rows are unknown"
        if self._table.mode == APPEND and not self._key:
            return "the target has the history of a table without a key, so its current rows are unknown"
        return None

    def kind(self, name: str) -> pa.DataType | None:
        """See ReadableTable.kind."""
        return self._table.kinds.get(column_name(name))

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Iterator[pa.RecordBatch]:
        """See ReadableTable.rows."""
        columns = [column_name(name) for name in names]
        for batch in self._table.read(columns, self._key, self._where(within)):
            yield batch.select(columns)

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:
        """See ReadableTable.count."""
        # the row count in the Delta log ignores deletion vectors
        columns = [column_name(names[0])] if names else [POSITION_COLUMN]
        return sum(batch.num_rows for batch in self._table.read(columns, self._key, self._where(within)))

    def _where(self, within: KeyRange | None) -> str | None:
        if within is None:
            return None
        column, kind = column_name(within.column), self.kind(within.column)
        is_text = kind is None or not pa.types.is_integer(kind)
        bounds = ((sign, getattr(within, name)) for sign, name in _BOUNDS)
        conditions = [
            f"{quote_identifier(column)} {sign} {quote_literal(at) if is_text else at}"
            for sign, at in bounds
            if at is not None
        ]
        return " AND ".join(conditions) or None


def open_table(record: TableRecord, version: int | None, key: Sequence[str]) -> ReadableTable:
    """Open the target of a table; return an UnreadableTable with the reason if this fails.

    So an unreadable target does not prevent the comparison of other tables.
    """
    try:
        return TableAtVersion(record, version, key)
    except SinkUnavailable as exc:
        return UnreadableTable(refusal_reason(exc))
