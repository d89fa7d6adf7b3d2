"""A pipeline without a source whose views are computed in the test's process: three tables, a lake, and views of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

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
from cdc.stores.published_record import Published
from cdc.table import Column, TableSchema
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_factory import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.views.log_of_views import LogOfViews
from pipelines.views.view_engine import ViewEngine
from pipelines.views.view_worker import open_log_of_views
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

SOURCE: Final = CommitSource(1, "7000", 1)
Values = tuple[str | None, ...]
"""The texts of a row, its key first."""
_TYPES: Final = {"integer": 23, "text": 25, "numeric": 1700, "date": 1082}
_PRICE: Final = (10 << 16 | 2) + 4
"""Type modifier of numeric(10,2)."""


def _table(relation: int, name: str, *columns: tuple[str, str]) -> TableSchema:
    found = [
        Column(
            id=number,
            name=column,
            type_oid=_TYPES[type_name],
            type_name=type_name,
            typmod=_PRICE if type_name == "numeric" else -1,
            key=0 if number == 1 else None,
        )
        for number, (column, type_name) in enumerate(columns, 1)
    ]
    return replace(schema_of(relation), name=name, columns=tuple(found))


_ID: Final = ("id", "integer")
CUSTOMERS: Final = _table(101, "customers", _ID, ("name", "text"))
ORDERS: Final = _table(102, "orders", _ID, ("customer_id", "integer"), ("status", "text"), ("day", "date"))
ITEMS: Final = _table(
    103, "items", _ID, ("order_id", "integer"), ("sku", "text"), ("quantity", "integer"), ("price", "numeric")
)
TABLES: Final = {schema.topic: schema for schema in (CUSTOMERS, ORDERS, ITEMS)}


class ShopViews:
    """One pipeline; `write` changes the tables, `publish` applies them to the lake, `compute` to the views."""

    def __init__(
        self, folder: Path, session: SparkSession, views: Sequence[Mapping[str, Any]], sinks: str = ""
    ) -> None:
        self.folder, self._session = folder, session
        self.tables: dict[str, dict[str, Values]] = {topic: {} for topic in TABLES}
        """Topic → key → row, as the source has it."""
        self._position = 1_000
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
            f"tables: [{{match: 'shop.*', exclude: ['shop.v_*']}}]\nlog: {{path: '{self.folder}/log'}}\n"
            f"sinks:\n- {{type: delta, name: lake, path: '{self.folder}/lake/{{schema}}/{{table}}'}}\n{sinks}"
            f"views: {[dict(view) for view in views]!r}\n"
        )
        return load_definition(path)

    def reopen(self, definition: Definition | None = None) -> None:
        """Open lake and engine as a new process does."""
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

    def close(self) -> None:
        self._loop.drain()
        self._lake.close()
        self._catalog.close()

    def write(self, *changes: tuple[str, str, Values]) -> None:
        """Commit one transaction of (topic, operation, row); the operations are c, u, d and t (truncate)."""
        self._position += 10
        rows: list[dict[str, Any]] = []
        for topic, operation, values in changes:
            rows += self._rows(TABLES[topic], operation, values, len(rows))
        self._writer.commit(self._writer.stage(table(*rows)), info(self._position))

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
        found = self.views.state(schema).to_pylist()
        return {tuple(dict(one["after"])[column.id] for column in schema.columns) for one in found}

    def _copy(self) -> None:
        """The first copy: three empty tables."""
        made: list[dict[str, Any]] = []
        for schema in TABLES.values():
            for operation, payload in (("s", schema.to_json()), ("g", str(self._position).encode())):
                order: dict[str, Any] = {"op": operation, "relation": schema.relation, "topic": schema.topic}
                made.append(row(self._position, len(made), **order, key=None, after=None, payload=payload))
        self._writer.commit(self._writer.stage(table(*made)), info(self._position))

    def _rows(self, schema: TableSchema, operation: str, values: Values, ordinal: int) -> Iterable[dict[str, Any]]:
        order: dict[str, Any] = {"relation": schema.relation, "topic": schema.topic}
        place = (self._position, ordinal)
        known = self.tables[schema.topic]
        if operation == "t":
            known.clear()
            yield row(*place, **order, op="t", key=None, after=None)
            return
        key = str(values[0])
        if operation == "d":
            known.pop(key, None)
            yield row(*place, **order, op="d", key=[key], after=None)
            return
        known[key] = values
        yield row(*place, **order, op=operation, key=[key], after=list(enumerate(values, 1)))
