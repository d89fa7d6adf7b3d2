"""Reader of a search server sink: its published record, searches, and all rows of a table."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from http import HTTPStatus
from types import MappingProxyType
from typing import Any, Final, Self

from cdc.config import SearchSinkDefinition
from cdc.config.search_sink import search_fingerprint
from cdc.errors import ConfigError, PositionNotReached, SinkUnavailable, TargetRulesChanged
from cdc.target_names import POSITION_COLUMN
from cdc.targets.dead_letter_rows import ParkedRow
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_index_reader import FoundRow, SearchPage
from cdc.targets.search_server.client import Answer, SearchClient, error_reason
from cdc.targets.search_server.document_rows import ShownTable
from cdc.targets.search_server.document_scan import KEEP_ALIVE, close_point, open_point, scan, scan_point
from cdc.targets.search_server.document_values import Number
from cdc.targets.search_server.index_mapping import visible
from cdc.targets.search_server.sink_state import PublishedState, SinkState

DOCUMENTS_AT_ONCE: Final = 2_000
PATIENCE: Final = 30.0
"""Seconds that `open_at_rest` waits for a cut without newer rows."""
PAUSE: Final = 0.05
"""Seconds between two attempts of `open_at_rest`."""


class SearchServerReader:
    """Reads the indexes of one sink at its published record, or at a kept cut."""

    def __init__(
        self,
        sink: SearchSinkDefinition,
        client: SearchClient,
        state: PublishedState | None,
        points: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """points: index → point in time at which it is read; an index without one is read as it is now."""
        self._sink, self._client, self._state, self._points = sink, client, state, points
        self.published: Published | None = None if state is None else state.record
        """The published record of the sink; None before its first cut."""

    @classmethod
    def open(cls, sink: SearchSinkDefinition, handle: str | None = None) -> Self:
        """Connect to the server of a sink. handle: the kept cut to read, as `pin` of the sink returned it.

        Raises SinkUnavailable if the sink has not written anything there yet.
        """
        client = _connected(sink)
        if handle is None:
            return cls(sink, client, _published(client, sink.name))
        kept = json.loads(handle)
        return cls(sink, client, PublishedState.from_source(kept["state"]), kept["points"])

    @classmethod
    def open_at_rest(cls, sink: SearchSinkDefinition, patience: float = PATIENCE) -> Self:
        """Open the published state of a sink so that later changes are not visible.

        A driver makes rows visible just before it publishes them. So this method tries again until no visible row is
        newer than the published record. Raises PositionNotReached after `patience` seconds.
        """
        client, until = _connected(sink), time.monotonic() + patience
        while True:
            state = _published(client, sink.name)
            indexes = sorted({t.target for t in state.record.tables.values() if t.target}) if state else []
            points = {index: open_point(client, index) for index in indexes}
            if state is None or all(_newest(client, point) <= state.record.position for point in points.values()):
                return cls(sink, client, state, points)
            for point in points.values():
                close_point(client, point)
            if time.monotonic() > until:
                raise PositionNotReached(
                    f"search sink {sink.name!r} has rows that are newer than its published position",
                    remedy="start 'cdc run', so that the sink publishes them, then try again",
                )
            time.sleep(PAUSE)

    def reopen(self) -> Self:
        """Return a reader of the present published record, with the same connections."""
        return type(self)(self._sink, self._client, _published(self._client, self._sink.name))

    def close(self) -> None:
        """Close the connections to the server."""
        self._client.close()

    @property
    def topics(self) -> dict[str, int]:
        """The relation of each topic; of a table that was created again, the latest relation."""
        tables = {} if self.published is None else self.published.tables
        return {tables[relation].topic: relation for relation in sorted(tables) if tables[relation].target}

    def column_names(self, topic: str) -> list[str]:
        """Return the names of the columns that the documents of a table have; empty for an unknown topic."""
        table = self._table(topic)
        return [] if table is None else [column.name for column in self._shown(table).columns]

    def check_rules(self, relation: int, sink: SearchSinkDefinition) -> None:
        """Raise TargetRulesChanged if documents of a table were written under other rules than the definition has.

        Such documents may contain values that the rules hide now.
        """
        table = None if self.published is None else self.published.tables.get(relation)
        if table is None or not table.target:
            return
        if self._shown(table).rules != search_fingerprint(table.topic, sink, sink.rules):
            raise TargetRulesChanged(
                f"the documents of table {table.topic!r} in index {table.target!r} of sink {sink.name!r} were written "
                "under other rules than the definition has now",
                remedy="build a new index: 'cdc replay SINK'; or restore the earlier rule in the definition",
            )

    def differences(self, sink: SearchSinkDefinition) -> list[tuple[str, TargetRulesChanged]]:
        """Return (topic, error) for each table whose documents were written under other rules than the definition."""
        found = list[tuple[str, TargetRulesChanged]]()
        for topic, relation in self.topics.items():
            try:
                self.check_rules(relation, sink)
            except TargetRulesChanged as exc:
                found.append((topic, exc))
        return found

    def search(self, topic: str | None, words: str, limit: int = 10) -> list[FoundRow]:
        """Return up to `limit` rows that contain every word, best match first.

        In `words`, `column:word` searches one column. If `topic` is None, the rows of all tables are searched.
        """
        found = [row for name in self.topics if topic in {None, name} for row in self._search(name, words, limit)]
        return sorted(found, key=lambda row: -row.score)[:limit]

    def page(self, topic: str, words: str, limit: int, after: Sequence[Any] | None = None) -> SearchPage:
        """Return up to `limit` rows of a table that contain every word; after: `next` of the page before.

        Rows with the same score are in the order of their keys, where the server can sort the key. Raises ConfigError
        if the server refuses the words or the beginning of the page.
        """
        table = self._table(topic)
        if table is None:
            return SearchPage([], None)
        shown = self._shown(table)
        # one more row than the page has shows whether another page follows
        body = {"size": limit + 1, "sort": shown.order, "track_total_hits": False}
        body |= {} if after is None else {"search_after": list(after)}
        answer = self._ask(table, shown, words, body)
        if answer.status == HTTPStatus.BAD_REQUEST:
            raise ConfigError(
                f"the search server refuses the search: {error_reason(answer.body)}",
                remedy="correct the words, or start the search again without the page token",
            )
        hits = answer.body["hits"]["hits"]
        place = [_parsed(value) for value in hits[limit - 1]["sort"]] if len(hits) > limit else None
        return SearchPage([shown.row(hit) for hit in hits[:limit]], place, shown.types)

    def documents(self, topic: str) -> Iterator[FoundRow]:
        """Yield all rows of a table, unordered; yield nothing if the sink does not have the topic."""
        table = self._table(topic)
        if table is None:
            return
        query, point = self._visible(table.target), self._points.get(table.target)
        if point is None:
            lists = scan(self._client, table.target, query, DOCUMENTS_AT_ONCE)
        else:
            lists = scan_point(self._client, point, query, DOCUMENTS_AT_ONCE)
        shown = self._shown(table)
        for hits in lists:
            for hit in hits:
                yield shown.row(hit)

    def parked(self) -> list[ParkedRow]:
        """Return the parked rows of the sink."""
        if self._state is None:
            return []
        parked = SinkState(self._client, self._sink.name).parked(self._state)
        return [row for rows in parked.values() for row in rows.values()]

    def _table(self, topic: str) -> TableRecord | None:
        relation = self.topics.get(topic)
        return None if relation is None or self.published is None else self.published.tables[relation]

    def _visible(self, index: str) -> dict[str, Any]:
        return visible(0 if self._state is None else self._state.floor(index))

    def _shown(self, table: TableRecord) -> ShownTable:
        mapping = self._client.ask("GET", f"/{table.target}/_mapping").body[table.target]["mappings"]
        return ShownTable.of(table, mapping)

    def _search(self, topic: str, words: str, limit: int) -> list[FoundRow]:
        table = self._table(topic)
        if table is None:
            return []
        shown = self._shown(table)
        answer = self._ask(table, shown, words, {"size": limit})
        # the words are no valid query string
        return (
            [] if answer.status == HTTPStatus.BAD_REQUEST else [shown.row(hit) for hit in answer.body["hits"]["hits"]]
        )

    def _ask(self, table: TableRecord, shown: ShownTable, words: str, body: Mapping[str, Any]) -> Answer:
        """Search the index of a table, and return the answer, which may be a refusal with status 400.

        body: everything but the query.
        """
        # copies of a shard give a row different scores, so pages of one search must come from the same copies
        copies = hashlib.sha256(words.encode()).hexdigest()[:16]
        options = {"query": words, "fields": shown.searched or ["*"], "default_operator": "AND", "lenient": True}
        for query in ({"query_string": {**options, "type": "cross_fields"}}, {"simple_query_string": options}):
            answer = self._client.ask(
                "POST",
                f"/{table.target}/_search?preference={copies}",
                {**body, "query": {"bool": {"must": [query], **self._visible(table.target)["bool"]}}},
                allowed=(HTTPStatus.BAD_REQUEST,),
                exact=True,
            )
            if answer.status != HTTPStatus.BAD_REQUEST:
                break
        return answer


def _connected(sink: SearchSinkDefinition) -> SearchClient:
    """Connect to the server of a sink. Raises SinkUnavailable if the sink has not written anything there yet."""
    client = SearchClient(sink.access, sink.engine)
    try:
        answer = client.ask("HEAD", f"/{SinkState(client, sink.name).index}", allowed=(HTTPStatus.NOT_FOUND,))
    except BaseException:
        client.close()
        raise
    if answer.status == HTTPStatus.NOT_FOUND:
        client.close()
        raise SinkUnavailable(
            f"the sink {sink.name!r} has no indexes on the search server yet",
            remedy="start 'cdc run', and wait until the sink has published a cut",
        )
    return client


def _published(client: SearchClient, sink: str) -> PublishedState | None:
    found = SinkState(client, sink).published()
    return None if found is None else found[0]


def _newest(client: SearchClient, point: str) -> int:
    """Return the position of the newest document at a point in time; -1 if there is none."""
    body = {"size": 1, "pit": {"id": point, "keep_alive": KEEP_ALIVE}, "sort": [{POSITION_COLUMN: "desc"}]}
    hits = client.ask("POST", "/_search", body, exact=True).body["hits"]["hits"]
    return int(hits[0]["_source"][POSITION_COLUMN]) if hits else -1


def _parsed(value: Any) -> Any:
    """Return a sort value as the JSON value that the server sent."""
    return json.loads(value) if isinstance(value, Number) else value
