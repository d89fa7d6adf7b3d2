"""Search index: the layout of the tantivy index of a sink, and reading it while the sink writes it.

A document is one row of a source table. Two reserved documents contain the id of the log and the published record, and
each parked row is one more document. One commit writes rows, parked rows and record together. Rows are stored by column
id, as in the log, so a renamed column or table rewrites nothing. A reader takes the names from the schema in the
published record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import tantivy

from cdc.errors import SinkUnavailable
from cdc.position import Position
from cdc.stores.dead_letter_rows import DeadLetterEntry, Key, ParkedRow, parked_at
from cdc.stores.published_record import Published, TableRecord
from cdc.table import TableSchema

PUBLISHED_ID: Final = "\0published"
"""`_id` of the document whose `_image` is the published record; a row's `_id` begins with a digit."""
OWNER_ID: Final = "\0owner"
"""`_id` of the document whose `_image` is the UUID of the log that fills the index."""
PARKED_TOPIC: Final = "\0parked"
"""`_topic` of the documents whose `_image` is a parked row; they have no `_relation`, unlike rows of a table."""
TERM_BYTES: Final = 60_000
"""Bytes above which a key is replaced by its digest: tantivy silently drops terms above 65,530 bytes."""


def layout() -> tantivy.Schema:
    """Return the tantivy schema of every search sink's index; an index with other fields belongs to another program."""
    fields = tantivy.SchemaBuilder()
    fields.add_text_field("_id", stored=True, tokenizer_name="raw", index_option="basic")
    fields.add_unsigned_field("_relation", stored=True, indexed=True)
    fields.add_text_field("_topic", stored=True, tokenizer_name="raw", index_option="basic")
    fields.add_bytes_field("_key", stored=True)
    fields.add_unsigned_field("_position", stored=True, indexed=True, fast=True)
    fields.add_unsigned_field("_ordinal", stored=True, fast=True)
    fields.add_bytes_field("_image", stored=True)
    fields.add_text_field("_text")
    fields.add_json_field("_fields")
    return fields.build()


def document_id(relation: int, key: Sequence[str | None]) -> str:
    """Return the `_id` of the document that stores a row."""
    term = f"{relation}\0{json.dumps(list(key), ensure_ascii=False)}"
    if len(term.encode()) <= TERM_BYTES:
        return term
    return f"{relation}\0sha256:{hashlib.sha256(term.encode()).hexdigest()}"


def parked_id(relation: int, key: Sequence[str | None]) -> str:
    """Return the `_id` of the document that stores a parked row."""
    return f"{PARKED_TOPIC}\0{document_id(relation, key)}"


def parked_rows(
    searcher: tantivy.Searcher, schema: tantivy.Schema, record: Published
) -> dict[int, dict[Key, ParkedRow]]:
    """Return the parked rows of an index by relation and key; `record` is the published record of the index."""
    query = tantivy.Query.term_query(schema, "_topic", PARKED_TOPIC)
    count = searcher.search(query, limit=1, count=True).count or 0
    hits = searcher.search(query, limit=max(1, count), count=False).hits
    images = (bytes(searcher.doc(address)["_image"][0]) for _, address in hits)
    return parked_at((DeadLetterEntry.from_json(json.loads(image)) for image in images), record, {})


def rows_of(schema: tantivy.Schema, relation: int, below: int | None = None) -> tantivy.Query:
    """Return a query for all rows of a relation; with `below`, only for rows at a lower position."""
    own = tantivy.Query.term_query(schema, "_relation", relation)
    if below is None:
        return own
    older = tantivy.Query.range_query(
        schema, "_position", tantivy.FieldType.Unsigned, upper_bound=below, include_upper=False
    )
    must = tantivy.Occur.Must
    return tantivy.Query.boolean_query([(must, own), (must, older)])


def stored_image(searcher: tantivy.Searcher, schema: tantivy.Schema, identity: str) -> bytes | None:
    """Return the field `_image` of the document with this `_id`; None if the document does not exist."""
    found = searcher.search(tantivy.Query.term_query(schema, "_id", identity), limit=1, count=False).hits
    if not found:
        return None
    return bytes(searcher.doc(found[0][1])["_image"][0])


def decode_image(stored: bytes) -> dict[int, str | None]:
    """Return the text of each column, by column id, as Postgres sent it; None is SQL NULL."""
    return {int(column): value for column, value in json.loads(stored).items()}


@dataclass(frozen=True, slots=True)
class FoundRow:
    """One row of a source table in the index."""

    topic: str
    key: tuple[str | None, ...]
    """Key columns as Postgres text, in key order."""
    position: Position
    source: Mapping[str, str | None]
    """Column name → text as Postgres sent it, for every sent column; None is SQL NULL."""
    score: float
    """Tantivy's score of the match; 0 if no words were searched."""


class SearchIndex:
    """Reads a search index as it was when it was opened; later commits of the sink are not visible."""

    def __init__(self, index: tantivy.Index) -> None:
        self._index = index
        self._schema = index.schema
        self._searcher = index.searcher()
        stored = stored_image(self._searcher, self._schema, PUBLISHED_ID)
        self.published: Published | None = None if stored is None else Published.from_json(stored.decode())
        """The published record of the sink; None before its first cut."""

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Open the index, or the kept cut of an index, at a path; raises SinkUnavailable if the path has no index."""
        try:
            return cls(tantivy.Index.open(str(path)))
        except (ValueError, OSError) as error:
            raise SinkUnavailable(
                f"the sink has no search index at {str(path)!r}",
                remedy="start 'cdc run', and wait until the sink has published a cut",
            ) from error

    @property
    def topics(self) -> dict[str, int]:
        """The relation of each topic in the index.

        If a table was dropped and created again, its topic has the latest relation.
        """
        tables = self._tables()
        return {tables[relation].topic: relation for relation in sorted(tables)}

    def search(self, topic: str | None, words: str, limit: int = 10) -> list[FoundRow]:
        """Return up to `limit` rows that contain every word, best match first.

        In `words`, `column:word` searches one column, and malformed parts are ignored. If `topic` is None, the rows of
        all tables are searched.
        """
        must = tantivy.Occur.Must
        query, _ = self._index.parse_query_lenient(words, ["_text", "_fields"], conjunction_by_default=True)
        if topic is not None:
            relation = self.topics.get(topic)
            if relation is None:
                return []
            own = tantivy.Query.const_score_query(rows_of(self._schema, relation), 0.0)
            query = tantivy.Query.boolean_query([(must, query), (must, own)])
        hits = self._searcher.search(query, limit=limit, count=False).hits
        return [self._row(address, score) for score, address in hits]

    def documents(self, topic: str) -> Iterator[FoundRow]:
        """Yield all rows of a table, unordered; yield nothing if the index does not contain the topic."""
        relation = self.topics.get(topic)
        if relation is None or not self._searcher.num_docs:
            return
        query = tantivy.Query.const_score_query(rows_of(self._schema, relation), 0.0)
        for _, address in self._searcher.search(query, limit=self._searcher.num_docs, count=False).hits:
            yield self._row(address, 0.0)

    def parked(self) -> list[ParkedRow]:
        """Return the parked rows of the sink."""
        if self.published is None:
            return []
        parked = parked_rows(self._searcher, self._schema, self.published)
        return [row for rows in parked.values() for row in rows.values()]

    def _tables(self) -> Mapping[int, TableRecord]:
        return self.published.tables if self.published is not None else {}

    def _row(self, address: tantivy.DocAddress, score: float) -> FoundRow:
        stored = self._searcher.doc(address)
        record = self._tables().get(stored["_relation"][0])
        image = decode_image(bytes(stored["_image"][0]))
        return FoundRow(
            topic=stored["_topic"][0] if record is None else record.topic,
            key=tuple(json.loads(bytes(stored["_key"][0]))),
            position=Position(stored["_position"][0]),
            source=named(image, None if record is None else record.schema),
            score=score,
        )


def named(image: Mapping[int, str | None], schema: str | None) -> dict[str, str | None]:
    """Return the values of a stored image by column name; a column that the image does not contain gets its default.

    `schema` is the JSON text of the table's schema. If it is None, the result has column ids instead of names.
    """
    if schema is None:
        return {str(column): value for column, value in image.items()}
    return {c.name: image.get(c.id, c.missing) for c in TableSchema.from_json(schema).sent}
