"""Table search: one search of a table in the sinks of a definition, which `cdc search` and the API run.

A search can wait for a position: the reader of the sink is opened again in short intervals until the table has reached
the position. So a program that has written to the source finds its own rows.

A page token continues a search only at the position of its first page. At another position the scores are different,
so some rows would be missing and others would appear twice.
"""

from __future__ import annotations

import hashlib
import json
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from cdc.config import Definition, SearchSinkDefinition
from cdc.config.sinks import searched_sinks
from cdc.errors import ConfigError, CutUnavailable, PositionNotReached, SinkUnavailable, UnknownName
from cdc.position import Position
from cdc.table import Column, split_topic
from cdc.targets.awaited_position import POLL, AwaitedPosition
from cdc.targets.json_values import conversion_of
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.search_index_reader import FoundRow
from cdc.targets.search_reader import SearchReader, open_search


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search, and which state of the sink is new enough."""

    table: str
    """`schema.table`, or only the table's name if one schema has it."""
    words: str
    limit: int = 10
    """Maximum number of rows of the page."""
    after: str | None = None
    """Page token of the page before; None for the first page."""
    sink: str | None = None
    """Name of a search sink; None means the first search sink that has the table."""
    min_position: str | None = None
    """Wait until the table has reached this position; an LSN without an epoch is of the sink's present epoch."""
    timeout: float = 10.0
    """Maximum seconds to wait for the position."""


@dataclass(frozen=True, slots=True)
class SearchAnswer:
    """One page of the rows that a search found."""

    topic: str
    position: Position
    """Position of the table in the published cut: the rows have every change up to it."""
    rows: Sequence[FoundRow]
    next: str | None
    """Page token of the next page; None if there are no more rows."""
    types: Mapping[str, Column] = field(default_factory=dict)
    """Name in the rows → the column of the source whose type the values have; others, such as masked ones, are text."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values; those of a row are as a query of a Delta table returns them."""
        conversions = {name: conversion_of(column) for name, column in self.types.items()}

        def typed(name: str, text: str | None) -> Any:
            return text if text is None or name not in conversions else conversions[name](text)

        rows = [
            {
                "key": list(row.key),
                "position": str(row.position),
                "score": row.score,
                "row": {name: typed(name, text) for name, text in row.source.items()},
            }
            for row in self.rows
        ]
        return {"topic": self.topic, "position": str(self.position), "rows": rows, "next": self.next}


class TableSearch:
    """A search that can wait for a position. It keeps its readers open until `close`; not for several threads at once.

    Raises ConfigError at once for a request that is malformed, and UnknownName for an unknown sink.
    """

    def __init__(self, definition: Definition, request: SearchRequest) -> None:
        self._request = request
        self._sinks = _search_sinks(definition, request.sink)
        self._wanted = None if request.min_position is None else AwaitedPosition.parse(request.min_position)
        self._token = None if request.after is None else _PageToken.decode(request.after, request)
        self._readers: dict[str, SearchReader] = {}
        self._unavailable: SinkUnavailable | None = None
        self._deadline = time.monotonic() + request.timeout
        self._attempts = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the readers."""
        for reader in self._readers.values():
            reader.close()

    @property
    def pause(self) -> float:
        """Seconds to wait before the next attempt."""
        remaining = max(0.0, self._deadline - time.monotonic())
        return min(remaining, POLL.seconds(self._attempts))

    def attempt(self) -> SearchAnswer | None:
        """Search, and return the page; None if the table has not reached the position yet.

        Raises PositionNotReached if the time is over, UnknownName for a table that no sink has, CutUnavailable if the
        page token belongs to another position, SinkUnavailable if a sink cannot be read, and TargetRulesChanged if the
        documents may have values that the rules of the sink hide.
        """
        self._attempts += 1
        self._unavailable = None
        is_last = self._wanted is None or time.monotonic() >= self._deadline
        for sink in self._sinks:
            reader = self._open(sink)
            topic = None if reader is None else find_topic(list(reader.topics), self._request.table)
            if reader is not None and topic is not None:
                reader.check_rules(reader.topics[topic], sink)
                return self._page(sink.name, reader, topic, is_last=is_last)
        if is_last or self._have_all_reached():
            raise self._unavailable or self._unknown_table()
        return None

    def _open(self, sink: SearchSinkDefinition) -> SearchReader | None:
        """Return a reader of the present state of a sink; None if it cannot be read."""
        try:
            opened = self._readers.get(sink.name)
            self._readers[sink.name] = open_search(sink) if opened is None else opened.reopen()
        except SinkUnavailable as error:
            self._unavailable = self._unavailable or error
            return None
        return self._readers[sink.name]

    def _page(self, sink: str, reader: SearchReader, topic: str, *, is_last: bool) -> SearchAnswer | None:
        table = _table(reader, topic)
        if self._wanted is not None and not _has_reached(table, self._wanted):
            if is_last:
                raise self._not_reached(sink, table)
            return None
        position = Position(table.position)
        place = None if self._token is None else self._token.place_at(position)
        page = reader.page(topic, self._request.words, self._request.limit, place)
        token = None if page.next is None else _PageToken(position, page.next).encode(self._request)
        return SearchAnswer(topic, position, page.rows, token, page.types)

    def _have_all_reached(self) -> bool:
        """Whether no sink can have the table at the wanted position, because all are there without it."""
        published = [reader.published for reader in self._readers.values()]
        return self._unavailable is None and all(
            record is not None and self._wanted is not None and self._wanted.is_reached(record.position)
            for record in published
        )

    def _not_reached(self, sink: str, table: TableRecord) -> PositionNotReached:
        state = "" if table.state == TargetState.STREAMING else f" and is {table.state}"
        reason = "" if table.reason is None else f" ({table.reason})"
        return PositionNotReached(
            f"table {table.topic!r} of search sink {sink!r} is at {Position(table.position)}{state}{reason}: it did "
            f"not reach {self._request.min_position} within {self._request.timeout:g} s"
        )

    def _unknown_table(self) -> UnknownName:
        topics = sorted({topic for reader in self._readers.values() for topic in reader.topics})
        several = any(self._request.table == split_topic(topic)[1] for topic in topics)
        return UnknownName(
            f"the search sinks contain {'several tables' if several else 'no table'} called {self._request.table!r}",
            remedy=f"choose one of these tables: {', '.join(topics) or 'none yet'}",
        )


def search_table(definition: Definition, request: SearchRequest) -> SearchAnswer:
    """Run a search in this thread; raises the errors of TableSearch."""
    with TableSearch(definition, request) as search:
        while (answer := search.attempt()) is None:
            time.sleep(search.pause)
        return answer


def find_topic(topics: Sequence[str], table: str) -> str | None:
    """Return the topic that a table name means; None if there is none, or if several schemas have the name."""
    fitting = [topic for topic in topics if table in {topic, split_topic(topic)[1]}]
    return table if table in fitting else fitting[0] if len(fitting) == 1 else None


def _search_sinks(definition: Definition, name: str | None) -> list[SearchSinkDefinition]:
    sinks = searched_sinks(definition.sinks)
    if not sinks:
        raise UnknownName(
            f"pipeline {definition.name!r} has no search sink", remedy="add a sink of type search to the definition"
        )
    named = [sink for sink in sinks if name in {None, sink.name}]
    if not named:
        known = ", ".join(repr(sink.name) for sink in sinks)
        raise UnknownName(
            f"the pipeline has no search sink called {name!r}", remedy=f"choose one of the search sinks: {known}"
        )
    return named


def _has_reached(table: TableRecord, wanted: AwaitedPosition) -> bool:
    return table.state != TargetState.SNAPSHOTTING and wanted.is_reached(table.position)


def _table(reader: SearchReader, topic: str) -> TableRecord:
    assert reader.published is not None  # noqa: S101 - a reader without a record has no topics
    return reader.published.tables[reader.topics[topic]]


@dataclass(frozen=True, slots=True)
class _PageToken:
    """Where the next page of a search begins, and at which position of the table."""

    position: Position
    place: Sequence[Any]

    def encode(self, request: SearchRequest) -> str:
        content = json.dumps([int(self.position), _digest(request), list(self.place)], separators=(",", ":"))
        return urlsafe_b64encode(content.encode()).decode().rstrip("=")

    @classmethod
    def decode(cls, text: str, request: SearchRequest) -> Self:
        try:
            content = json.loads(urlsafe_b64decode(text.encode() + b"=" * (-len(text) % 4)))
        except ValueError as error:
            raise _malformed_token() from error
        match content:
            case [int() as position, str() as digest, list() as place] if place and position >= 0:
                if digest != _digest(request):
                    raise ConfigError(
                        "the page token belongs to another search",
                        remedy="repeat table, words and sink as they were for the first page",
                    )
                return cls(Position(position), place)
        raise _malformed_token()

    def place_at(self, position: Position) -> Sequence[Any]:
        if position != self.position:
            raise CutUnavailable(
                f"the page token belongs to {self.position}, but the table is at {position}",
                remedy="start the search again without the page token; a larger limit needs fewer pages",
            )
        return self.place


def _malformed_token() -> ConfigError:
    return ConfigError("malformed page token", remedy="write the token as the page before has it in 'next'")


def _digest(request: SearchRequest) -> str:
    """Return a short text that identifies the search of which a token is a part."""
    content = json.dumps([request.table, request.words, request.sink])
    return hashlib.sha256(content.encode()).hexdigest()[:16]
