"""Reading of search sinks with a local index; the reading of indexes on a server has the same steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from cdc.config.search_sink import SearchSinkDefinition
from cdc.errors import SinkError, SinkUnavailable
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_index_reader import FoundRow, SearchIndex
from cdc.targets.search_reader import SearchReader
from cdc.targets.sink_reading import ParkedState, RuleFinding

if TYPE_CHECKING:
    from cdc.postgres.key_range_digests import KeyRange

AT_ONCE: Final = 4096
"""Documents of one batch of rows."""


class SearchReading:
    """How the index of a search sink is read."""

    def open(self, sink: SearchSinkDefinition, handle: str | None = None, *, at_rest: bool = False) -> SearchReader:  # noqa: ARG002 - an opened index does not change
        """Open the published state of a sink, or a kept cut; see `cdc.targets.search_reader.open_search`."""
        return SearchIndex.open(handle or sink.path)

    def is_begun(self, sink: SearchSinkDefinition) -> bool:
        """See SinkReading.is_begun."""
        return Path(sink.path, "meta.json").exists()

    def published(self, sink: SearchSinkDefinition) -> Published | None:
        """See SinkReading.published."""
        try:
            return self.open(sink).published
        except SinkUnavailable:
            return None

    def parked(self, sink: SearchSinkDefinition) -> ParkedState:
        """See SinkReading.parked."""
        index = self.open(sink)
        return ParkedState(index.published, index.parked())

    def check_rules(self, sink: SearchSinkDefinition, relation: int) -> None:
        """See SinkReading.check_rules."""
        self.open(sink).check_rules(relation, sink)

    def rule_findings(self, sink: SearchSinkDefinition) -> Iterator[RuleFinding]:
        """See SinkReading.rule_findings. The apply process makes an index follow the rules, so no finding stops it."""
        try:
            differing = self.open(sink).differences(sink)
        except SinkUnavailable:
            return  # the apply process has not created the index yet
        except SinkError as exc:  # the search server refuses the connection
            yield RuleFinding(f"sink {sink.name}", None, exc, exc.message, stops=False)
            return
        for topic, error in differing:
            yield RuleFinding(topic, topic, error, error.message, stops=False)

    def published_state(self, sink: SearchSinkDefinition) -> PublishedIndex:
        """See SinkReading.published_state."""
        return PublishedIndex(self.open(sink, at_rest=True))

    def table_at_cut(
        self,
        sink: SearchSinkDefinition,
        handle: str,
        record: TableRecord,
        key: Sequence[str],  # noqa: ARG002 - documents have no ranges of keys
    ) -> TableDocuments:
        """See SinkReading.table_at_cut."""
        return TableDocuments(self.open(sink, handle), record.topic)


class PublishedIndex:
    """An opened index, which later commits do not change."""

    def __init__(self, index: SearchReader) -> None:
        self._index = index

    @property
    def record(self) -> Published | None:
        """See PublishedTargets.record."""
        return self._index.published

    @property
    def has_newer_versions(self) -> bool:
        """See PublishedTargets.has_newer_versions."""
        return False

    def table(self, record: TableRecord, key: Sequence[str], *, newest: bool) -> TableDocuments:  # noqa: ARG002 - there is one version
        """See PublishedTargets.table."""
        return TableDocuments(self._index, record.topic)


class TableDocuments:
    """The documents of a table in an opened search index. Values are text, as the source sent them, or masked."""

    reads_ranges = False
    refusal: str | None = None

    def __init__(self, index: SearchReader, topic: str) -> None:
        self._index, self._topic = index, topic
        self._columns = frozenset(index.column_names(topic))

    def kind(self, name: str) -> pa.DataType | None:
        """See ReadableTable.kind."""
        return pa.string() if name in self._columns else None

    def rows(self, names: Sequence[str], within: KeyRange | None = None) -> Iterator[pa.RecordBatch]:  # noqa: ARG002 - never a range
        """See ReadableTable.rows. A column that is absent from a document is null."""
        return document_batches(self._index.documents(self._topic), names)

    def count(self, names: Sequence[str], within: KeyRange | None = None) -> int:  # noqa: ARG002 - as above
        """See ReadableTable.count."""
        return sum(batch.num_rows for batch in self.rows(names[:1]))


def document_batches(documents: Iterable[FoundRow], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Convert documents to columns of text; a column that is absent from a document is null."""
    remaining = iter(documents)
    while documents_of_batch := list(islice(remaining, AT_ONCE)):
        columns = [
            pa.array([document.source.get(name) for document in documents_of_batch], pa.string()) for name in names
        ]
        yield pa.RecordBatch.from_arrays(columns, names=[*names])
