"""Search reader: reads what a search sink has published, whatever its engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, Self, cast

from cdc.config import SearchSinkDefinition
from cdc.errors import TargetRulesChanged
from cdc.targets.dead_letter_rows import ParkedRow
from cdc.targets.published_record import Published
from cdc.targets.search_index_reader import FoundRow, SearchPage
from cdc.targets.sink_kinds import reading_of


class SearchReader(Protocol):
    """The published rows of a search sink."""

    @property
    def published(self) -> Published | None:
        """The published record of the sink; None before its first cut."""

    @property
    def topics(self) -> dict[str, int]:
        """The relation of each topic; of a table that was created again, the latest relation."""

    def column_names(self, topic: str) -> list[str]:
        """Return the names of the columns that the documents of a table have; empty for an unknown topic."""

    def check_rules(self, relation: int, sink: SearchSinkDefinition) -> None:
        """Raise TargetRulesChanged if documents of a table were written under other rules than the definition has.

        Such documents may contain values that the rules hide now.
        """

    def differences(self, sink: SearchSinkDefinition) -> list[tuple[str, TargetRulesChanged]]:
        """Return (topic, error) for each table whose documents were written under other rules than the definition."""

    def search(self, topic: str | None, words: str, limit: int = 10) -> list[FoundRow]:
        """Return up to `limit` rows that contain every word, best match first.

        In `words`, `column:word` searches one column. If `topic` is None, the rows of all tables are searched.
        """

    def page(self, topic: str, words: str, limit: int, after: Sequence[Any] | None = None) -> SearchPage:
        """Return up to `limit` rows of a table that contain every word, best match first, as `search` does.

        after: `next` of the page before; the reader must be at the same position as for that page. Rows with the same
        score have an order that stays the same while the position does.
        """

    def reopen(self) -> Self:
        """Return a reader of what the sink has published now; it shares the connections of this one."""

    def close(self) -> None:
        """Close the connections of the reader, and of all readers that share them."""

    def documents(self, topic: str) -> Iterator[FoundRow]:
        """Yield all rows of a table, unordered; yield nothing if the sink does not have the topic."""

    def parked(self) -> list[ParkedRow]:
        """Return the parked rows of the sink."""


class _OpensSearch(Protocol):
    """The reading of a kind of sink whose targets can be searched."""

    def open(self, sink: SearchSinkDefinition, handle: str | None = None, *, at_rest: bool = False) -> SearchReader:
        """Open the published state of a sink, or a kept cut."""


def open_search(sink: SearchSinkDefinition, handle: str | None = None, *, at_rest: bool = False) -> SearchReader:
    """Open the published state of a sink, or a kept cut. handle: the result of the sink's `pin`.

    at_rest: whether all rows have to be of the published record, however long they are read.

    Raises SinkUnavailable if the sink has not written anything yet.
    """
    return cast("_OpensSearch", reading_of(sink)).open(sink, handle, at_rest=at_rest)
