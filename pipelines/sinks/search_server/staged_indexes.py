"""Staged indexes: new indexes that a replay builds next to the old ones; one request moves all aliases to them.

A replay has a state index of its own. Searches use the old indexes until `put` has published the new ones and moved
the aliases. After a crash in between, the next driver that opens the sink moves the aliases. The old indexes stay until
`cdc indexes drop` removes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cdc.config import SearchSinkDefinition
from cdc.config.search_sink import search_fingerprint
from cdc.failpoint import hit
from cdc.table import TableSchema
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.index_inventory import drop_index, indexes_of_sink, unused
from cdc.targets.search_server.index_names import number_of
from cdc.targets.search_server.sink_state import SinkState, published_indexes
from pipelines.sinks.search_server.sink import SearchServerSink, staged_name


class StagedSearchServer:
    """The new indexes that a replay fills through the attribute `sink`; `put` publishes them instead of the old ones.

    Only one process may use an instance.
    """

    def __init__(self, sink: SearchSinkDefinition) -> None:
        self._definition = sink
        self.erased: dict[str, int] = {}
        """See StagedTarget.erased. Old indexes that follow the present rules stay until `cdc indexes drop`."""
        self.sink = SearchServerSink(sink, staged=True)
        self._old = SearchServerSink(sink)
        self._log_id = ""

    def forget_earlier(self, schemas: Mapping[int, TableSchema]) -> None:  # noqa: ARG002 - they know their owner
        """Remove the indexes that an earlier replay built and did not publish."""
        sink = self._definition.name
        with SearchClient(self._definition.access, self._definition.engine) as client:
            client.check()
            published = published_indexes(client, sink)
            for index in indexes_of_sink(client, sink, SinkState(client, sink).owner() or ""):
                # a running driver may have created the first index of a table that is not published yet
                if index.relation in published and index.number > number_of(published[index.relation]):
                    drop_index(client, index.name)
            SinkState(client, staged_name(sink)).remove()

    def open_published(self, log_id: str) -> Published | None:
        """Return the published record of the sink; None if nothing was published.

        If a driver publishes after this call, `put` raises SinkFenced.
        """
        self._log_id = log_id
        return self._old.open(log_id)

    def put(self, built: Published, rest: Mapping[int, TableRecord]) -> Published:
        """Publish the new indexes instead of the old ones, and return the published record.

        built: the record of the new indexes. rest: the records of the tables that the replay did not build.
        """
        published = replace(built, tables={**rest, **built.tables})
        hit("replay_before_table")
        self._old.adopt(self.sink, published.tables.keys() - rest.keys(), published)
        hit("replay_after_table")
        self.discard()
        sink = self._definition
        with SearchClient(sink.access, sink.engine) as client:
            for index in unused(indexes_of_sink(client, sink.name, self._log_id), published):
                if index.rules != search_fingerprint(index.topic, sink, sink.rules):
                    drop_index(client, index.name)
                    self.erased[index.name] = 1
            SinkState(client, staged_name(sink.name)).remove()
        return published

    def discard(self) -> None:
        """Close the connections; the next replay removes new indexes that were not published."""
        self.sink.close()
        self._old.close()
