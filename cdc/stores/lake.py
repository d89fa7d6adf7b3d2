"""Lake: read-only access to the Delta targets of a sink: its published record, its tables, SQL over them.

Reading goes through delta-rs' own engine (`scan`, QueryBuilder): the `to_pyarrow*` ways return silent
nulls after a rename and fail on deletion vectors, and `count` ignores deletion vectors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Self

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from cdc.errors import ConfigError, SinkUnavailable
from cdc.naming import published_uri
from cdc.stores.published import Published, TableRecord
from cdc.table import parted, topic

PUBLISHED_SCHEMA: Final = pa.schema([("position", pa.int64()), ("committed_at", pa.int64()), ("record", pa.string())])
"""The one row of `_cdc/published`: Position, µs since 1970 UTC, Published.to_json."""

_QUOTED: Final = r'"(?:[^"]|"")+"'
_NAME: Final = rf"(?:{_QUOTED}|[^\W\d]\w*)"
_TOKEN: Final = re.compile(
    rf"(?P<skip>'(?:[^']|'')*'|--[^\n]*|/\*.*?\*/)|(?P<schema>{_NAME})\s*\.\s*(?P<table>{_NAME})|(?P<name>{_NAME})",
    re.DOTALL,
)


class At(StrEnum):
    """Which state of the tables a query sees."""

    #: The last published cut: all tables at one position.
    PUBLISHED = "published"
    #: The newest version of every table; they may stand at different positions.
    LATEST = "latest"


class Lake:
    """One Delta sink's targets, opened for reading; every call sees what is published now."""

    def __init__(self, template: str) -> None:
        self._published_uri = published_uri(template)

    @classmethod
    def open(cls, template: str) -> Self:
        """By the sink's path template; nothing is read yet."""
        return cls(template)

    def published(self) -> Published | None:
        """The sink's record, None when nothing was published yet."""
        try:
            return read_published(DeltaTable(self._published_uri))
        except TableNotFoundError:
            return None

    def tables(self) -> list[TableRecord]:
        """The tables of the published record, by topic."""
        record = self.published()
        return sorted(record.tables.values(), key=lambda table: table.topic) if record else []

    def read(self, target: str, version: int | None = None) -> pa.RecordBatchReader:
        """The rows of one target at a version (None: the newest), in no order; see read_target."""
        return read_target(target, version)

    def query(self, sql: str, at: At = At.PUBLISHED) -> pa.RecordBatchReader:
        """Run a SELECT over the tables, named `schema.table`, or `table` where that is unambiguous.

        Only tables that the text names are opened. Raises ConfigError for SQL that DataFusion refuses.
        """
        text, wanted = bound(sql, {table.topic: table for table in self.tables()})
        builder = QueryBuilder()
        for alias, table in wanted.items():
            builder = builder.register(alias, _table(table.target, table.version if at is At.PUBLISHED else None))
        try:
            return pa.RecordBatchReader.from_stream(builder.execute(text))
        except DeltaError as exc:
            raise ConfigError(f"query refused: {exc}", remedy=_known(self.tables())) from exc


def read_target(target: str, version: int | None = None) -> pa.RecordBatchReader:
    """Stream the rows of a Delta table at a version (None: the newest), without reading it whole.

    String and binary columns come as views (`string_view`), as the engine holds them. Raises
    SinkUnavailable when there is no such table or version.
    """
    return pa.RecordBatchReader.from_stream(_table(target, version).scan())


def read_published(table: DeltaTable) -> Published | None:
    """The record in an opened `_cdc/published` table, None while it is empty."""
    rows = pa.table(table.scan(columns=["record"]))
    return Published.from_json(rows["record"][0].as_py()) if rows.num_rows else None


def bound(sql: str, tables: Mapping[str, TableRecord]) -> tuple[str, dict[str, TableRecord]]:
    """SQL with every table's name replaced by an alias, and alias → table for those it names.

    Pure. The engine has one flat set of names, so `shop.orders` becomes `orders` where no other
    schema has that table, else `shop__orders`. Literals and comments stay.
    """
    parts = {table: parted(table) for table in tables}
    names = [name for _, name in parts.values()]
    alias_of = {
        table: name if names.count(name) == 1 else f"{schema}__{name}" for table, (schema, name) in parts.items()
    }
    topic_of = {alias: table for table, alias in alias_of.items()}
    used: dict[str, TableRecord] = {}

    def replaced(match: re.Match[str]) -> str:
        if match["skip"]:
            return match.group()
        if match["schema"]:
            whole = topic(_plain(match["schema"]), _plain(match["table"]))
            # not a table: `orders.id`, a column of one
            named, rest = (
                (whole, "") if whole in tables else (topic_of.get(_plain(match["schema"])), "." + match["table"])
            )
        else:
            named, rest = topic_of.get(_plain(match["name"])), ""
        if named is None:
            return match.group()
        used[_quoted(alias_of[named])] = tables[named]
        return _quoted(alias_of[named]) + rest

    return _TOKEN.sub(replaced, sql), used


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name.lower()


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _table(target: str, version: int | None) -> DeltaTable:
    try:
        return DeltaTable(target, version=version)
    except (TableNotFoundError, DeltaError) as exc:
        raise SinkUnavailable(f"no readable table at {target!r}, version {version!r}") from exc


def _known(tables: list[TableRecord]) -> str:
    return f"tables are: {', '.join(table.topic for table in tables) or 'none yet'}"
