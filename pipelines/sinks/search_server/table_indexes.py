"""Table indexes: creates the indexes of a sink's tables, follows changes of their columns, and sets their aliases.

Applications search a table by its alias. The alias points at one index and hides deleted rows and rows below the floor
of the index. All changes of aliases are one request, which the server carries out in one step.

The `_meta` of a mapping names the owner of an index and has the columns by their ids. So a renamed column is found
again: its values move to the field with the new name, document by document. A column that changed its type needs a
new index.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Final

import pyarrow as pa
import structlog

from cdc.config.search_server import SearchServer
from cdc.errors import CdcError, IndexMappingConflict, IndexMissing, IndexOfAnotherOwner, TargetRulesChanged
from cdc.table import TableSchema
from cdc.target_names import DELETED_COLUMN, POSITION_COLUMN
from cdc.targets.search_server.client import Answer, SearchClient
from cdc.targets.search_server.document_scan import scan
from cdc.targets.search_server.document_values import RAW_FIELD, dump_json, to_json
from cdc.targets.search_server.index_mapping import (
    META,
    UNUSED_SINCE,
    DocumentColumn,
    document_columns,
    field_types,
    index_body,
    owner_of,
    visible,
)
from cdc.targets.search_server.index_names import alias_name, index_name, write_alias
from pipelines.sinks.search.document_shape import DocumentShape
from pipelines.sinks.search_server.bulk_writer import BulkWriter, Line
from pipelines.sinks.search_server.document_lines import TableIndex

REWRITTEN_AT_ONCE: Final = 2_000
"""Number of documents that are read and written together when a column was renamed or has a default."""

log = structlog.get_logger("apply")


class TableIndexes:
    """The indexes of one sink; one thread at a time may use an instance."""

    def __init__(self, client: SearchClient, access: SearchServer, owner: tuple[str, str], writer: BulkWriter) -> None:
        """owner: the id of the log and the name of the sink to which the indexes belong."""
        self._client, self._access, self._owner, self._writer = client, access, owner, writer
        self._known: dict[int, TableIndex] = {}

    def alias(self, schema: TableSchema) -> str:
        """Return the alias of a table."""
        return alias_name(self._access.index, schema.schema, schema.name)

    def of(self, shape: DocumentShape, index: str | None, number: int) -> TableIndex:
        """Return the index of a table with floor 0; create it, or add new columns to it, if necessary.

        index: name of the index in the published record; None if the table has no index yet. number: number of a new
        index. Raises IndexMissing if the published index does not exist any more, IndexOfAnotherOwner if the name
        belongs to another program, and IndexMappingConflict if the index cannot take the columns.
        """
        schema = shape.schema
        known = self._known.get(schema.relation)
        if known is not None and known.shape == shape and index in {None, known.index}:
            return known
        alias = self.alias(schema)
        name = index or index_name(alias, schema.relation, number)
        table = TableIndex(name, shape, document_columns(shape.columns, self._access.field_types), 0)
        self._prepare(table, alias, must_exist=index is not None)
        self._known[schema.relation] = table
        return table

    def sync_aliases(self, wanted: Mapping[str, tuple[str, int]], left: Mapping[str, str]) -> set[str]:
        """Set the aliases of tables in one step, and return those that an index of another owner has.

        Such an alias is not changed. wanted: alias → (index, its floor). left: alias → index of a table that left the
        sink; the alias is removed from it.
        """
        actions, taken = list[dict[str, Any]](), set[str]()
        for alias, (index, floor) in wanted.items():
            present = self._behind(alias)
            others = [other for other in present if other != index]
            try:
                self._check_owned(others, alias)
            except IndexOfAnotherOwner:
                taken.add(alias)
                continue
            actions += self._without_alias(others, alias)
            if present.get(index, {}).get("aliases", {}).get(alias, {}).get("filter") == visible(floor):
                continue
            # the next batch of a table reports that its index was deleted
            if self._client.ask("HEAD", f"/{index}", allowed=(HTTPStatus.NOT_FOUND,)).status != HTTPStatus.NOT_FOUND:
                actions.append({"add": {"index": index, "alias": alias, "filter": visible(floor)}})
        for alias, index in left.items():
            actions += self._without_alias([index] if index in self._behind(alias) else [], alias)
        if actions:
            self._client.ask("POST", "/_aliases", {"actions": actions})
        return taken

    def _behind(self, alias: str) -> Mapping[str, Any]:
        """Return index → description of its aliases, for each index behind an alias."""
        found = self._client.ask("GET", f"/_alias/{alias}", allowed=(HTTPStatus.NOT_FOUND,))
        behind: Mapping[str, Any] = {} if found.status == HTTPStatus.NOT_FOUND else found.body
        return behind

    def _without_alias(self, indexes: Iterable[str], alias: str) -> list[dict[str, Any]]:
        """Mark indexes as unused, and return the actions that remove an alias from them."""
        actions = []
        for index in indexes:
            self._mark_unused(index)
            actions.append({"remove": {"index": index, "alias": alias}})
        return actions

    def check_free(self, alias: str) -> None:
        """Raise IndexOfAnotherOwner if the alias is the name of an index, or points at an index of another owner."""
        found = self._client.ask("GET", f"/{alias}", allowed=(HTTPStatus.NOT_FOUND,))
        if found.status != HTTPStatus.NOT_FOUND:
            self._check_owned(found.body, alias)

    def refresh(self, indexes: Iterable[str]) -> None:
        """Make all documents of indexes visible to searches."""
        if names := ",".join(sorted(set(indexes))):
            self._client.ask("POST", f"/{names}/_refresh?ignore_unavailable=true")

    def remove_tombstones(self, index: str, below: int, floor: int) -> None:
        """Begin to remove the documents of rows that were deleted below a position, and those below the floor."""
        tombstones = {"bool": {"filter": [{"term": {DELETED_COLUMN: True}}, _below(below)]}}
        query = {"bool": {"should": [tombstones, _below(floor)]}}
        path = f"/{index}/_delete_by_query?conflicts=proceed&wait_for_completion=false"
        self._client.ask("POST", path, {"query": query}, allowed=(HTTPStatus.NOT_FOUND,))

    def _prepare(self, table: TableIndex, alias: str, *, must_exist: bool) -> None:
        index, topic = table.index, table.shape.schema.topic
        present = self._client.ask("GET", f"/{index}", allowed=(HTTPStatus.NOT_FOUND,))
        if present.status != HTTPStatus.NOT_FOUND:
            mappings = present.body[index]["mappings"]
            if owner_of(mappings) != self._owner:
                raise IndexOfAnotherOwner(f"index {index!r} belongs to somebody else")
            if write_alias(index) not in present.body[index]["aliases"]:
                # an earlier version of cdc was killed between two requests, or somebody removed the alias
                self._client.ask("PUT", f"/{index}/_alias/{write_alias(index)}")
            self._follow(table, mappings)
            return
        if must_exist:
            raise IndexMissing(f"index {index!r} of table {topic!r} was deleted on the search server")
        self.check_free(alias)
        body = index_body(self._fields(table), self._meta(table), self._access.settings, self._access.mappings)
        # index and alias in one request: a driver that is killed leaves both or neither
        body["aliases"] = {write_alias(index): {}}
        created = self._client.ask("PUT", f"/{index}", body, allowed=(HTTPStatus.BAD_REQUEST,))
        if created.status == HTTPStatus.BAD_REQUEST and created.error_type != "resource_already_exists_exception":
            raise self._conflict(created, f"to create index {index!r}")

    def _fields(self, table: TableIndex) -> dict[str, Any]:
        return field_types(table.columns, self._access.field_types, self._client.engine)

    def _meta(self, table: TableIndex) -> dict[str, Any]:
        schema = table.shape.schema
        return {
            "log_id": self._owner[0],
            "sink": self._owner[1],
            "topic": schema.topic,
            "relation": schema.relation,
            "key": [column.id for column in schema.key],
            "columns": [column.to_json() for column in table.columns],
            "rules": table.shape.fingerprint,
        }

    def _conflict(self, answer: Answer, request: str) -> CdcError:
        error = self._client.error(answer, request)
        return error if isinstance(error, IndexMappingConflict) else IndexMappingConflict(error.message)

    def _check_owned(self, indexes: Iterable[str], alias: str) -> None:
        for index in indexes:
            body = self._client.ask("GET", f"/{index}/_mapping").body
            if index == alias or owner_of(body[index]["mappings"]) != self._owner:
                raise IndexOfAnotherOwner(f"index {index!r}, found under the name {alias!r}, belongs to somebody else")

    def _mark_unused(self, index: str) -> None:
        """Record in an index, which is about to lose its alias, since when it is unused."""
        meta = self._client.ask("GET", f"/{index}/_mapping").body[index]["mappings"]["_meta"][META]
        self._put_mapping(index, {"_meta": {META: {**meta, UNUSED_SINCE: int(time.time())}}})

    def _follow(self, table: TableIndex, mappings: Mapping[str, Any]) -> None:
        """Make an existing index of this sink follow the columns of its table."""
        marked: Mapping[str, Any] = mappings["_meta"][META]
        meta = {name: value for name, value in marked.items() if name != UNUSED_SINCE}
        if meta != marked:
            # the index is in use again: its table came back, or a crash interrupted a switch
            self._put_mapping(table.index, {"_meta": {META: meta}})
        wanted = self._meta(table)
        if meta == wanted:
            return
        if meta["rules"] != wanted["rules"]:
            raise TargetRulesChanged(
                f"index {table.index!r} was written under other rules for table {table.shape.schema.topic!r}",
                remedy="build a new index under the present rules: 'cdc replay SINK'",
            )
        before = [DocumentColumn.from_json(parts) for parts in (*meta.get("dropped", ()), *meta["columns"])]
        self._check_followed(table, before, meta["key"])
        fields = {name: field for name, field in self._fields(table).items() if name not in mappings["properties"]}
        if fields:
            self._put_mapping(table.index, {"properties": fields})
        if (change := _document_change(table, before)) is not None:
            self._rewrite(table.index, change)
        ids = {column.id for column in table.columns}
        dropped = [column.to_json() for column in before if column.id not in ids]
        self._put_mapping(table.index, {"_meta": {META: {**wanted, **({"dropped": dropped} if dropped else {})}}})

    def _check_followed(self, table: TableIndex, before: Sequence[DocumentColumn], key: Sequence[int]) -> None:
        """Raise IndexMappingConflict if a column or the key changed in a way that needs a new index."""
        schema = table.shape.schema
        if list(key) != [column.id for column in schema.key]:
            raise IndexMappingConflict(
                f"the key of table {schema.topic!r} changed, and with it the ids of the documents in {table.index!r}"
            )
        known, taken = {column.id: column for column in before}, {column.field: column.id for column in before}
        for column in table.columns:
            earlier = known.get(column.id, column)
            if earlier.type != column.type or taken.get(column.field, column.id) != column.id:
                raise IndexMappingConflict(
                    f"field {column.field!r} of index {table.index!r} has values of another type or of another column "
                    f"of table {schema.topic!r}"
                )

    def _put_mapping(self, index: str, body: Mapping[str, Any]) -> None:
        answer = self._client.ask("PUT", f"/{index}/_mapping", body, allowed=(HTTPStatus.BAD_REQUEST,))
        if answer.status == HTTPStatus.BAD_REQUEST:
            raise self._conflict(answer, f"a change of the mapping of index {index!r}")

    def _rewrite(self, index: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        """Apply a function to every document of an index; a document keeps its version."""
        log.info("rewriting the documents of an index, because columns changed", index=index)
        self.refresh([index])
        for documents in scan(self._client, index, {"match_all": {}}, REWRITTEN_AT_ONCE):
            lines = [Line(number, _document_line(hit, change)) for number, hit in enumerate(documents)]
            refused = self._writer.write(write_alias(index), lines)
            if refused:
                raise next(iter(refused.values()))


def _document_change(
    table: TableIndex, before: Iterable[DocumentColumn]
) -> Callable[[dict[str, Any]], dict[str, Any]] | None:
    """Return a function that renames fields of a document and adds defaults; None if no document changes."""
    known, missing = {column.id: column for column in before}, table.shape.missing
    renamed, added = dict[str, str](), dict[str, str]()
    for column in table.columns:
        earlier, default = known.get(column.id), missing[column.id]
        if earlier is not None and earlier.field != column.field:
            renamed[earlier.field] = column.field
        elif earlier is None and default is not None:
            added[column.field] = to_json(pa.array([default], pa.string()), column.type)[0]
    if not renamed and not added:
        return None

    def change(source: dict[str, Any]) -> dict[str, Any]:
        fields = {renamed.get(name, name): dump_json(value) for name, value in source.items()}
        if RAW_FIELD in source:
            fields[RAW_FIELD] = dump_json({renamed.get(name, name): value for name, value in source[RAW_FIELD].items()})
        # a deleted row has no columns
        return fields if DELETED_COLUMN in source else {**added, **fields}

    return change


def _below(position: int) -> dict[str, Any]:
    return {"range": {POSITION_COLUMN: {"lt": position}}}


def _document_line(hit: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]) -> bytes:
    source, position = hit["_source"], hit["_source"][POSITION_COLUMN]
    action = dump_json({"index": {"_id": hit["_id"], "version": position, "version_type": "external_gte"}})
    fields = ",".join(f"{dump_json(name)}:{text}" for name, text in change(source).items())
    return f"{action}\n{{{fields}}}\n".encode()
