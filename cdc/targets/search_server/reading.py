"""Reading of search sinks whose indexes are on a search server."""

from __future__ import annotations

from cdc.config.search_sink import SearchSinkDefinition
from cdc.targets.search_reader import SearchReader
from cdc.targets.search_reading import SearchReading
from cdc.targets.search_server.reader import SearchServerReader


class SearchServerReading(SearchReading):
    """How the indexes of a search sink on a server are read."""

    def open(self, sink: SearchSinkDefinition, handle: str | None = None, *, at_rest: bool = False) -> SearchReader:
        """Open the published state of a sink, or a kept cut; see `cdc.targets.search_reader.open_search`."""
        return SearchServerReader.open_at_rest(sink) if at_rest else SearchServerReader.open(sink, handle)

    def is_begun(self, sink: SearchSinkDefinition) -> bool:  # noqa: ARG002 - the server is not asked
        """Return False: the rules of the sink are checked at each start, without a connection to the server."""
        return False
