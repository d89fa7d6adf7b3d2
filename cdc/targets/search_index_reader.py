"""Search index: the layout of the tantivy index of a sink, and reading it while the sink writes it.

A document is one row of a source table. Three reserved documents contain the id of the log, the published record, and
the rules under which the rows were written; each parked row is one more document. One commit writes all of them
together. Rows are stored by column id, as in the log, so a renamed column or table rewrites nothing. A reader takes the
names from the stored rules. An index of an earlier version of cdc has no rules; then the names are those of the schema
in the published record.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from json.encoder import encode_basestring  # type: ignore[attr-defined] # written in C, and missing in the stubs
from pathlib import Path
from typing import Any, Final, Self

import tantivy

from cdc.config import SearchSettings, SearchSinkDefinition
from cdc.config.search_sink import search_fingerprint
from cdc.errors import ConfigError, CutUnavailable, SinkUnavailable, TargetRulesChanged
from cdc.position import Position
from cdc.table import Column, TableSchema
from cdc.targets.dead_letter_rows import DeadLetterEntry, Key, ParkedRow, parked_at
from cdc.targets.published_record import Published, TableRecord

PUBLISHED_ID: Final = "\0published"
"""`_id` of the document whose `_image` is the published record; a row's `_id` begins with a digit."""
OWNER_ID: Final = "\0owner"
"""`_id` of the document whose `_image` is the UUID of the log that fills the index."""
RULES_ID: Final = "\0rules"
"""`_id` of the document whose `_image` is a JSON object: relation → DocumentRules."""
PARKED_TOPIC: Final = "\0parked"
"""`_topic` of the documents whose `_image` is a parked row; they have no `_relation`, unlike rows of a table."""
REBUILD: Final = "rebuild the index: 'cdc replay SINK'; or restore the earlier rule in the definition"
"""Remedy for documents that cannot follow the rules."""
TEXT_TYPES: Final = frozenset({19, 25, 1042, 1043, 1009, 1015})
"""OIDs of the text types and their arrays, whose words can be searched. citext has no fixed OID; its name is used."""
NULL: Final = "null"
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
    return id_of_key(relation, key_json(key))


def id_of_key(relation: int, key: str) -> str:
    """Return the `_id` of the document that stores a row. key: the key of the row, as `key_json` returns it."""
    term = f"{relation}\0{key}"
    if len(term.encode()) <= TERM_BYTES:
        return term
    return f"{relation}\0sha256:{hashlib.sha256(term.encode()).hexdigest()}"


def key_json(key: Sequence[str | None]) -> str:
    """Return a key as a JSON list of texts."""
    return f"[{', '.join(NULL if text is None else encode_basestring(text) for text in key)}]"


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


def is_searched(column: Column) -> bool:
    """Return whether the words of a column can be searched: it has a text type."""
    return column.value_type[0] in TEXT_TYPES or column.type_name.rpartition(".")[2] == "citext"


@dataclass(frozen=True, slots=True)
class IndexedColumn:
    """One column of the documents of a table."""

    name: str
    missing: str | None = None
    """The text, masked if the column is, that the column has in documents older than the column."""
    searched: bool = True
    """Whether the words of the column can be searched."""


@dataclass(frozen=True, slots=True)
class DocumentRules:
    """The rules under which the documents of one table were written, stored in the index with them."""

    fingerprint: str
    """cdc.config.search_sink.search_fingerprint of the rules; empty if the documents follow no single set of rules."""
    columns: Mapping[int, IndexedColumn] = field(default_factory=dict)
    """Column id → column, for the columns of the documents; a document has no other values."""
    masks: Mapping[int, str] = field(default_factory=dict)
    """Id of a masked column → hash of its mask, keyed with its salt."""
    function: str | None = None
    """The Python function of the transform; None without one."""
    stopped_in: str | None = None
    """The state of the table before it stopped because its rules changed; None if it did not stop."""

    @classmethod
    def plain(cls, schema: TableSchema) -> Self:
        """Return the rules of documents that have every column as the source sent it."""
        columns = {c.id: IndexedColumn(c.name, c.missing, is_searched(c)) for c in schema.sent}
        return cls(search_fingerprint(schema.topic, SearchSettings(), ()), columns)

    def named(self, image: Mapping[int, str | None]) -> dict[str, str | None]:
        """Return the values of a stored image by column name; an absent column has its default."""
        return {column.name: image.get(number, column.missing) for number, column in self.columns.items()}

    def to_json(self) -> dict[str, Any]:
        """Return the rules as JSON fields."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build rules from the fields that `to_json` returned, after they were JSON text."""
        columns = {int(number): IndexedColumn(**column) for number, column in fields["columns"].items()}
        masks = {int(number): text for number, text in fields["masks"].items()}
        return cls(**{**fields, "columns": columns, "masks": masks})


def stored_rules(searcher: tantivy.Searcher, schema: tantivy.Schema) -> dict[int, DocumentRules]:
    """Return relation → rules of its documents; an index of an earlier version of cdc has none."""
    stored = stored_image(searcher, schema, RULES_ID)
    found = {} if stored is None else json.loads(stored)
    return {int(relation): DocumentRules.from_json(fields) for relation, fields in found.items()}


@dataclass(frozen=True, slots=True)
class FoundRow:
    """One row of a source table in the index."""

    topic: str
    key: tuple[str | None, ...]
    """Key columns as Postgres text, in key order."""
    position: Position
    source: Mapping[str, str | None]
    """Column name → text as Postgres sent it, or masked, for every column of the document; None is SQL NULL."""
    score: float
    """Tantivy's score of the match; 0 if no words were searched."""


@dataclass(frozen=True, slots=True)
class SearchPage:
    """Some of the rows that a search finds, best match first."""

    rows: Sequence[FoundRow]
    next: Sequence[Any] | None
    """Where the next page begins, as JSON values that only the engine reads; None if there are no more rows."""
    types: Mapping[str, Column] = field(default_factory=dict)
    """Name in the rows → the column of the source whose type the values have; others, such as masked ones, are text."""


class SearchIndex:
    """Reads a search index as it was when it was opened; later commits of the sink are not visible."""

    def __init__(self, index: tantivy.Index) -> None:
        self._index = index
        self._schema = index.schema
        self._searcher = index.searcher()
        stored = stored_image(self._searcher, self._schema, PUBLISHED_ID)
        self.published: Published | None = None if stored is None else Published.from_json(stored.decode())
        """The published record of the sink; None before its first cut."""
        self._rules = stored_rules(self._searcher, self._schema)

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

    def reopen(self) -> Self:
        """Return a reader of the newest commit."""
        self._index.reload()
        return type(self)(self._index)

    def close(self) -> None:
        """Do nothing: the index has no connection, and its files are closed with the last reader."""

    @property
    def topics(self) -> dict[str, int]:
        """The relation of each topic in the index.

        If a table was dropped and created again, its topic has the latest relation.
        """
        tables = self._tables()
        return {tables[relation].topic: relation for relation in sorted(tables)}

    def column_names(self, topic: str) -> list[str]:
        """Return the names of the columns that the documents of a table have; empty for an unknown topic."""
        relation = self.topics.get(topic)
        return [] if relation is None else [column.name for column in self._rules_of(relation).columns.values()]

    def check_rules(self, relation: int, sink: SearchSinkDefinition) -> None:
        """Raise TargetRulesChanged if documents of a table were written under other rules than the definition has.

        Such documents may contain values that the rules hide now.
        """
        table = self._tables().get(relation)
        if table is None or self._rules_of(relation).fingerprint == search_fingerprint(table.topic, sink, sink.rules):
            return
        raise TargetRulesChanged(
            f"the documents of table {table.topic!r} in the index of sink {sink.name!r} were written under other rules "
            "than the definition has now",
            remedy=f"restart the apply process, which makes the documents follow; if the table then stops, {REBUILD}",
        )

    def differences(self, sink: SearchSinkDefinition) -> list[tuple[str, TargetRulesChanged]]:
        """Return (topic, error) for each table whose documents were written under other rules than the definition."""
        found = list[tuple[str, TargetRulesChanged]]()
        for relation, table in self._tables().items():
            try:
                self.check_rules(relation, sink)
            except TargetRulesChanged as exc:
                found.append((table.topic, exc))
        return found

    def search(self, topic: str | None, words: str, limit: int = 10) -> list[FoundRow]:
        """Return up to `limit` rows that contain every word, best match first.

        In `words`, `column:word` searches one column, and malformed parts are ignored. If `topic` is None, the rows of
        all tables are searched.
        """
        query = self._query(topic, words)
        if query is None:
            return []
        hits = self._searcher.search(query, limit=limit, count=False).hits
        return [self._row(address, score) for score, address in hits]

    def page(self, topic: str, words: str, limit: int, after: Sequence[Any] | None = None) -> SearchPage:
        """Return up to `limit` rows of a table that contain every word; after: `next` of the page before.

        Rows with the same score are in the order of the index. Raises CutUnavailable if that order has changed since
        the page before, because the sink merged segments.
        """
        query = self._query(topic, words)
        if query is None:
            return SearchPage([], None)
        offset, last = (0, None) if after is None else self._place(after)
        skipped = min(offset, 1)  # the last row of the page before is read again
        hits = self._searcher.search(query, limit=skipped + limit + 1, offset=offset - skipped, count=False).hits
        rows = [self._row(address, score) for score, address in hits[: skipped + limit]]
        if skipped and (not rows or _digest(rows[0]) != last):
            raise CutUnavailable(
                "the index was reorganized since the page before, so the search cannot continue",
                remedy="start the search again without the page token",
            )
        has_more = len(hits) > skipped + limit
        place = [offset + limit, _digest(rows[-1])] if has_more else None
        return SearchPage(rows[skipped:], place, self._types_of(self.topics[topic]))

    def _place(self, after: Sequence[Any]) -> tuple[int, str]:
        """Return the number of the rows before a page, and the digest of the last of them."""
        match after:
            case [int() as offset, str() as last] if 0 < offset <= self._searcher.num_docs:
                return offset, last
        raise ConfigError("malformed page token", remedy="write the token as the page before has it")

    def _query(self, topic: str | None, words: str) -> tantivy.Query | None:
        """Return the query for the rows of a topic that contain every word; None if the index has no such topic."""
        must = tantivy.Occur.Must
        query, _ = self._index.parse_query_lenient(words, ["_text", "_fields"], conjunction_by_default=True)
        if topic is None:
            return query
        relation = self.topics.get(topic)
        if relation is None:
            return None
        own = tantivy.Query.const_score_query(rows_of(self._schema, relation), 0.0)
        return tantivy.Query.boolean_query([(must, query), (must, own)])

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

    def _rules_of(self, relation: int) -> DocumentRules:
        """Return the rules of a table's documents; without columns if the index has neither rules nor a schema."""
        found = self._rules.get(relation)
        if found is None:
            record = self._tables().get(relation)
            schema = None if record is None or record.schema is None else TableSchema.from_json(record.schema)
            found = DocumentRules("") if schema is None else DocumentRules.plain(schema)
            self._rules[relation] = found
        return found

    def _types_of(self, relation: int) -> dict[str, Column]:
        """Return name in the rows → column of the source, for the columns that are not masked."""
        record, rules = self._tables()[relation], self._rules_of(relation)
        sent = () if record.schema is None else TableSchema.from_json(record.schema).sent
        return {
            rules.columns[column.id].name: column
            for column in sent
            if column.id in rules.columns and column.id not in rules.masks
        }

    def _row(self, address: tantivy.DocAddress, score: float) -> FoundRow:
        stored = self._searcher.doc(address)
        relation = stored["_relation"][0]
        record, image = self._tables().get(relation), decode_image(bytes(stored["_image"][0]))
        return FoundRow(
            topic=stored["_topic"][0] if record is None else record.topic,
            key=tuple(json.loads(bytes(stored["_key"][0]))),
            position=Position(stored["_position"][0]),
            source=self._rules_of(relation).named(image),
            score=score,
        )


def _digest(row: FoundRow) -> str:
    """Return a short text that identifies a row and its score."""
    return hashlib.sha256(json.dumps([row.score, row.key]).encode()).hexdigest()[:16]
