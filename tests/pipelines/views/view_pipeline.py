"""A pipeline without a source whose views are computed in the test's process: its tables, a lake, and views of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from pyspark.sql import SparkSession

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, load_definition
from cdc.log.disk_format import CommitSource
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import Column, TableSchema
from cdc.targets.published_record import Published
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.views.log_of_views import LogOfViews
from pipelines.views.view_engine import ViewEngine
from pipelines.views.view_worker import open_log_of_views
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

SOURCE: Final = CommitSource(1, "7000", 1)
ANY_TIME: Final = 3_600.0
"""Seconds for which a step waits for its computations, on a machine that is busy: longer than a test may take."""
Values = tuple[str | None, ...]
"""The texts of a row, in the order of the columns."""
Key = tuple[str, ...]
_TYPES: Final = {
    "smallint": 21,
    "integer": 23,
    "bigint": 20,
    "text": 25,
    "numeric": 1700,
    "date": 1082,
    "double precision": 701,
}


class Change(NamedTuple):
    """One change of a table; the operations are those of the log, and `t` needs no row."""

    topic: str
    operation: str
    values: Values
    """For `d` at least the texts of the key columns."""
    old_key: Key | None = None
    """Key before an update that changed it."""
    unsent: frozenset[int] = frozenset()
    """Ids of the columns that an update does not contain."""


def table_of(relation: int, topic: str, *columns: str, key: int = 1) -> TableSchema:
    """A table whose columns are written as in SQL, such as `price numeric(10,2)`; its first columns are the key."""
    schema, name = topic.split(".")
    found = []
    for number, column in enumerate(columns, 1):
        title, _, declared = column.partition(" ")
        type_name, _, modifier = declared.rstrip(")").partition("(")
        precision, scale = map(int, modifier.split(",")) if modifier else (0, 0)
        found.append(
            Column(
                id=number,
                name=title,
                type_oid=_TYPES[type_name],
                type_name=type_name,
                typmod=(precision << 16 | scale) + 4 if modifier else -1,
                key=number - 1 if number <= key else None,
            )
        )
    return replace(schema_of(relation), schema=schema, name=name, columns=tuple(found))


class ViewPipeline:
    """One pipeline; `write` changes the tables, `publish` applies them to the lake, `compute` to the views."""

    def __init__(
        self,
        folder: Path,
        session: SparkSession,
        tables: Iterable[TableSchema],
        views: Sequence[Mapping[str, Any]],
        sinks: str = "",
    ) -> None:
        self.folder, self._session = folder, session
        self.schemas = {schema.topic: schema for schema in tables}
        self.tables: dict[str, dict[Key, Values]] = {topic: {} for topic in self.schemas}
        """Topic → key → row, as the source has it."""
        self._position = 1_000
        self.committed_at = 1_700_000_000_000_000
        """Commit time of the next transaction, in microseconds since 1970 UTC."""
        folder.mkdir(exist_ok=True)
        self.definition = self.define(views, sinks)
        put_catalog(folder)
        self._writer = LogWriter.open(self.definition.log.root, IDENTITY, LIMITS)
        self._catalog = Catalog.open(self.definition.catalog.url)
        self.views: LogOfViews
        self.engine: ViewEngine
        self._copy()
        self.reopen()

    def define(self, views: Sequence[Mapping[str, Any]], sinks: str = "") -> Definition:
        """Write the definition with these views, and read it."""
        path = self.folder / "shop.yaml"
        path.write_text(
            "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\n"
            f"tables: [{{match: '*.*', exclude: ['*.v_*']}}]\nlog: {{path: '{self.folder}/log'}}\n"
            f"sinks:\n- {{type: delta, name: lake, path: '{self.folder}/lake/{{schema}}/{{table}}'}}\n{sinks}"
            f"views: {json.dumps([dict(view) for view in views])}\n"
        )
        return load_definition(path)

    def reopen(self, definition: Definition | None = None) -> None:
        """Open lake and engine as a new process does."""
        if hasattr(self, "engine"):
            self.engine.close()
        self.definition = definition or self.definition
        self._lake = build_sink(self.definition.sinks[0])
        fold = RangeFolder(LogReader(self.definition.log.root), "lake", ("*.*",))
        figures = SinkFigures("shop", "lake", metrics.Metrics())
        self._loop = SinkLoop(self._lake, fold, CutRequests(self._catalog, "shop"), figures)
        self._loop.open()
        change_log = LogReader(self.definition.log.root)
        self.views = open_log_of_views(self.definition, change_log)
        sink = self.definition.sink_of_view_inputs
        assert sink is not None
        self.engine = ViewEngine(self.definition.views, sink, self.views, change_log, self._session)
        self.engine.patience = ANY_TIME

    def close(self) -> None:
        self.engine.close()
        self._loop.drain()
        self._lake.close()
        self._catalog.close()

    def write(self, *changes: tuple[str, str, Values] | Change) -> None:
        """Commit one transaction with these changes."""
        self._position += 10
        rows: list[dict[str, Any]] = []
        for change in changes:
            rows += self._rows(Change(*change), len(rows))
        self._commit(rows)

    def alter(self, schema: TableSchema, rows: Mapping[Key, Values]) -> None:
        """Commit another version of a table, with its rows as they then are."""
        self._position += 10
        self.schemas[schema.topic], self.tables[schema.topic] = schema, dict(rows)
        self._commit([self._control(schema, 0, "s", schema.to_json())])

    def publish(self) -> Published:
        """Apply the log to the lake, and return the published record."""
        self._loop(None, Position(self._position))
        return self._loop.record

    def compute(self) -> None:
        """Apply the log to the lake, and compute the views there."""
        assert self.engine.advance(self.publish(), SOURCE)

    def changes(self, view: str) -> list[dict[str, Any]]:
        """Every row of a view in its log, at the last cut."""
        log = LogReader(self.definition.log.of_views)
        found = pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0)), LOG_SCHEMA)
        ordered = found.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist()
        return [r for r in ordered if r["topic"] == view and r["position"] == log.durable]

    def rows(self, view: str) -> set[tuple[str | None, ...]]:
        """The rows of a view as its log has them."""
        schema = self.views.schemas()[view]
        found = self.views.now().rows(schema).to_pylist()
        return {tuple(dict(one["after"])[column.id] for column in schema.columns) for one in found}

    def _copy(self) -> None:
        """The first copy: empty tables."""
        made: list[dict[str, Any]] = []
        for schema in self.schemas.values():
            made.append(self._control(schema, len(made), "s", schema.to_json()))
            made.append(self._control(schema, len(made), "g", str(self._position).encode()))
        self._commit(made)

    def _commit(self, rows: Sequence[dict[str, Any]]) -> None:
        timed = [one | {"committed_at": self.committed_at} for one in rows]
        commit = replace(info(self._position), committed_at=self.committed_at)
        self._writer.commit(self._writer.stage(table(*timed)), commit)

    def _control(self, schema: TableSchema, ordinal: int, operation: str, payload: bytes | None) -> dict[str, Any]:
        order: dict[str, Any] = {"op": operation, "relation": schema.relation, "topic": schema.topic}
        return row(self._position, ordinal, **order, key=None, after=None, payload=payload)

    def _rows(self, change: Change, ordinal: int) -> Iterable[dict[str, Any]]:
        schema, known = self.schemas[change.topic], self.tables[change.topic]
        order: dict[str, Any] = {"relation": schema.relation, "topic": schema.topic}
        if change.operation == "t":
            known.clear()
            yield self._control(schema, ordinal, "t", None)
            return
        key = tuple(str(value) for value in change.values[: len(schema.key)])
        if change.operation == "d" or change.old_key is not None:
            gone = change.old_key or key
            known.pop(gone, None)
            yield row(self._position, ordinal, **order, op="d", key=list(gone), after=None)
            ordinal += 1
        if change.operation == "d":
            return
        known[key] = change.values
        image = [
            (column.id, value)
            for column, value in zip(schema.columns, change.values, strict=True)
            if column.id not in change.unsent
        ]
        order |= {"op": change.operation, "key": list(key), "after": image, "partial": bool(change.unsent)}
        old_key = None if change.old_key is None else list(change.old_key)
        yield row(self._position, ordinal, **order, old_key=old_key)
