"""Sink state: what a search sink has on its server: the state index, and the indexes of its tables.

The state index has the owner of the sink, its published record and its parked rows.

A document that is larger than the server accepts in a request is stored in parts. A row that the server refused because
of its size would otherwise not fit into the document with the parked rows either.

The published record is replaced only by the driver that read it last: a request names the version of the document that
it replaces. So a driver that another one has replaced cannot publish any more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any, Final, Self
from urllib.parse import quote

from cdc.errors import DocumentTooLarge
from cdc.targets.dead_letter_rows import DeadLetterEntry, Key, ParkedRow, parked_at
from cdc.targets.published_record import Published
from cdc.targets.search_server.client import SearchClient

PUBLISHED: Final = "published"
"""Id of the document with the published record."""
OWNER: Final = "owner"
"""Id of the document with the id of the log."""
STARTED: Final = "started"
"""Id of the document with the position up to which the driver may have written rows."""
PARTS: Final = "parts"
"""Field of a document that is stored in parts: the number of the parts."""
_LARGEST_PART: Final = 1 << 20
_SMALLEST_PART: Final = 1 << 10
"""Characters of a part; no server has a limit for requests that is so low."""


@dataclass(frozen=True, slots=True)
class Version:
    """The version of a document of the state; a later one exists once the document was replaced."""

    number: int
    term: int


@dataclass(frozen=True, slots=True)
class PublishedState:
    """What a sink has published: the record, and what belongs to it."""

    record: Published
    floors: Mapping[str, int] = field(default_factory=dict)
    """Index → its floor; rows at a lower position were removed by a truncate or a full copy. Default 0."""
    parked: Mapping[int, str] = field(default_factory=dict)
    """Relation → id of the document with its parked rows; only for tables that have parked rows."""
    marks: Sequence[tuple[int, int]] = ()
    """Pairs (seconds since 1970, position published then), oldest first."""

    def to_source(self) -> dict[str, Any]:
        """Return the source of the document."""
        return {
            "record": self.record.to_json(),
            "position": self.record.position,
            "floors": dict(self.floors),
            "parked": {str(relation): identity for relation, identity in self.parked.items()},
            "marks": [list(mark) for mark in self.marks],
        }

    @classmethod
    def from_source(cls, source: Mapping[str, Any]) -> Self:
        """Return the state that a document contains."""
        return cls(
            Published.from_json(source["record"]),
            dict(source["floors"]),
            {int(relation): identity for relation, identity in source["parked"].items()},
            [(seconds, position) for seconds, position in source["marks"]],
        )

    def floor(self, index: str) -> int:
        """Return the floor of an index."""
        return self.floors.get(index, 0)


class SinkState:
    """The documents of one sink's state index."""

    def __init__(self, client: SearchClient, sink: str) -> None:
        self._client = client
        self.index: Final = f"{client.index_prefix}cdc-{sink}"

    def create(self) -> None:
        """Create the index if it does not exist."""
        body = {
            "settings": {"index": {"number_of_shards": 1, "auto_expand_replicas": "0-1", "hidden": True}},
            "mappings": {"enabled": False},
        }
        if self._client.ask("HEAD", f"/{self.index}", allowed=(HTTPStatus.NOT_FOUND,)).status == HTTPStatus.NOT_FOUND:
            self._client.ask("PUT", f"/{self.index}", body, allowed=(HTTPStatus.BAD_REQUEST,))

    def remove(self) -> None:
        """Remove the index with all its documents."""
        self._client.ask("DELETE", f"/{self.index}", allowed=(HTTPStatus.NOT_FOUND,))

    def get(self, identity: str) -> tuple[dict[str, Any], Version] | None:
        """Return a document and its version; None if it does not exist."""
        answer = self._client.ask("GET", self._path(identity), allowed=(HTTPStatus.NOT_FOUND,))
        if answer.status == HTTPStatus.NOT_FOUND:
            return None
        return answer.body["_source"], _version(answer.body)

    def put(self, identity: str, source: Mapping[str, Any]) -> None:
        """Create or replace a document."""
        self._client.ask("PUT", self._path(identity), source)

    def replace(self, identity: str, source: Mapping[str, Any], before: Version | None) -> Version | None:
        """Replace a document that has the version `before`, or create it if `before` is None; return the new version.

        Return None, and write nothing, if the document has another version.
        """
        condition = "op_type=create" if before is None else f"if_seq_no={before.number}&if_primary_term={before.term}"
        path = f"{self._path(identity)}?{condition}"
        answer = self._client.ask("PUT", path, source, allowed=(HTTPStatus.CONFLICT,))
        if answer.status != HTTPStatus.CONFLICT:
            return _version(answer.body)
        # the answer to an earlier attempt of this request may have been lost
        found = self.get(identity)
        return found[1] if found is not None and found[0] == json.loads(json.dumps(source)) else None

    def get_whole(self, identity: str) -> dict[str, Any] | None:
        """Return a document that `put_whole` stored; None if it does not exist."""
        found = self.get(identity)
        if found is None or PARTS not in found[0]:
            return None if found is None else found[0]
        parts = [self.get(part) for part in _part_ids(identity, found[0][PARTS])]
        source: dict[str, Any] = json.loads("".join(part[0]["text"] for part in parts if part is not None))
        return source

    def put_whole(self, identity: str, source: Mapping[str, Any]) -> None:
        """Create or replace a document; store it in parts if it is larger than the server accepts in a request."""
        try:
            return self.put(identity, source)
        except DocumentTooLarge:
            text = json.dumps(source, ensure_ascii=False)
        size = min(_LARGEST_PART, len(text) // 2)
        while True:
            texts = [text[start : start + size] for start in range(0, len(text), size)]
            try:
                for part, piece in zip(_part_ids(identity, len(texts)), texts, strict=True):
                    self.put(part, {"text": piece})
                return self.put(identity, {PARTS: len(texts)})
            except DocumentTooLarge:
                size //= 2
                if size < _SMALLEST_PART:
                    raise

    def delete(self, identity: str) -> None:
        """Delete a document with its parts, if it exists."""
        found = self.get(identity)
        parts = () if found is None else _part_ids(identity, found[0].get(PARTS, 0))
        for name in (*parts, identity):
            self._client.ask("DELETE", self._path(name), allowed=(HTTPStatus.NOT_FOUND,))

    def owner(self) -> str | None:
        """Return the id of the log that the sink belongs to; None before the sink was opened."""
        found = self.get(OWNER)
        return None if found is None else str(found[0]["log_id"])

    def published(self) -> tuple[PublishedState, Version] | None:
        """Return the published state and its version; None if nothing was published."""
        found = self.get(PUBLISHED)
        return None if found is None else (PublishedState.from_source(found[0]), found[1])

    def put_parked(self, relation: int, rows: Mapping[Key, ParkedRow], upto: int) -> str | None:
        """Store the parked rows of a table, and return the id of the document; None for no rows."""
        if not rows:
            return None
        identity = f"parked-{relation}-{upto}"
        entries = [DeadLetterEntry(row).to_json() for row in rows.values()]
        self.put_whole(identity, {"entries": json.dumps(entries, ensure_ascii=False)})
        return identity

    def parked(self, state: PublishedState) -> dict[int, dict[Key, ParkedRow]]:
        """Return the parked rows of the sink, by relation and key."""
        found = (self.get_whole(identity) for identity in state.parked.values())
        texts = (entry for document in found if document is not None for entry in json.loads(document["entries"]))
        return parked_at(map(DeadLetterEntry.from_json, texts), state.record, {})

    def _path(self, identity: str) -> str:
        return f"/{self.index}/_doc/{quote(identity, safe='')}"


def published_indexes(client: SearchClient, sink: str) -> dict[int, str]:
    """Return relation → index of each table that a sink has published."""
    found = SinkState(client, sink).published()
    tables = {} if found is None else found[0].record.tables
    return {relation: table.target for relation, table in tables.items() if table.target}


def with_mark(state: PublishedState, now: int, every: int, kept: int) -> PublishedState:
    """Return the state with a mark of its position, if the last mark is older than `every` seconds.

    kept: seconds after which a mark is removed, except for the newest of the marks that are older.
    """
    marks = list(state.marks)
    if not marks or now - marks[-1][0] >= every:
        marks.append((now, state.record.position))
    while len(marks) > 1 and now - marks[1][0] >= kept:
        marks.pop(0)
    return replace(state, marks=marks)


def _part_ids(identity: str, count: int) -> list[str]:
    return [f"{identity}.{number}" for number in range(1, count + 1)]


def _version(body: Mapping[str, Any]) -> Version:
    return Version(body["_seq_no"], body["_primary_term"])
