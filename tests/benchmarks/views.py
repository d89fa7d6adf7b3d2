"""Views: how fresh a document view of three tables is, and what its first build and a step of 1,000 changes cost.

Part `fresh` runs `cdc run` with a view and a Delta sink of views; the clock of a change starts with its commit in
Postgres and stops when the published record of that sink that contains it is visible. Part `engine` computes the same
view in this process over tables that Spark wrote, of two sizes; the peer is the same SQL as a whole in the same
session. A step changes 1,000 random rows. The tables are measured twice: clustered, with their rows sorted by id and so
the items also by order, and unclustered, with their rows in random order.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Any, Final

from pyspark.sql import SparkSession
from pyspark.sql import functions as F

from cdc.catalog import Catalog
from cdc.config import Definition, load_definition
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from cdc.table import Column, TableSchema
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import Published, TableRecord
from pipelines.runtime.spark_session import SparkSettings, spark_session
from pipelines.views.view_engine import ViewEngine
from pipelines.views.view_worker import open_log_of_views
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import SOURCE_SETTINGS, ReaderPlace, prepare, running_module, under_load, until
from tests.benchmarks.search_freshness import SeenRecords, lags_of
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table
from tests.pipelines.views.view_pipeline import SOURCE

_LONGEST: Final = 3_600.0
"""Seconds that a computation may take."""
PARTS: Final = ("fresh", "engine")
ROWS, QUICK_ROWS = 10_000_000, 1_000_000
"""Rows of the larger table of items; the smaller one has a tenth."""
ORDERS, QUICK_ORDERS = 1_000_000, 100_000
SECONDS, QUICK_SECONDS, WARM, QUICK_WARM = 60.0, 15.0, 30.0, 10.0
RATE: Final = 50.0
"""Transactions per second of four changes each."""
LOOK_EVERY: Final = 0.1
"""Seconds between two looks at the published record; a look takes 5 ms of a core that the pipeline needs."""
REACHED: Final = 0.95
"""Share of the rate that has to be committed."""
CLUSTERED, UNCLUSTERED = "clustered", "unclustered"
ORDERS_OF_ROWS: Final = (CLUSTERED, UNCLUSTERED)
CHANGES: Final = 1_000
STEPS: Final = 3
"""Steps of 1,000 changes, of which the median counts: the first one of a JVM loads and compiles more."""
SQL: Final = (
    "SELECT o.id AS order_id, o.status, named_struct('id', c.id, 'name', c.name) AS customer,"
    " array_sort(collect_list(named_struct('id', i.id, 'quantity', i.quantity))) AS items,"
    " sum(i.quantity * i.price) AS total FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
    " LEFT JOIN shop.items i ON i.order_id = o.id GROUP BY o.id, o.status, c.id, c.name"
)
VIEW: Final = {"name": "shop.v_documents", "key": ["order_id"], "sql": SQL}
SETUP: Final = (
    "CREATE SCHEMA shop",
    "CREATE TABLE shop.customers (id int PRIMARY KEY, name text NOT NULL)",
    "CREATE TABLE shop.orders (id int PRIMARY KEY, customer_id int NOT NULL, status text NOT NULL)",
    "CREATE TABLE shop.items (id int PRIMARY KEY, order_id int NOT NULL, quantity int NOT NULL, price numeric(10, 2))",
    "INSERT INTO shop.customers SELECT n, 'customer ' || n FROM generate_series(1, {orders} / 10) n",
    "INSERT INTO shop.orders SELECT n, 1 + n % ({orders} / 10), 'new' FROM generate_series(1, {orders}) n",
    "INSERT INTO shop.items SELECT n, 1 + n / 3, n % 7, n % 100 FROM generate_series(1, 3 * {orders} - 3) n",
    (
        "CREATE PROCEDURE shop.paced(transactions int, rate double precision) LANGUAGE plpgsql AS $$"
        "DECLARE began timestamptz := clock_timestamp(); n int; one int; other int; ordered int; customer int;"
        " BEGIN FOR n IN 1..transactions LOOP"
        " one := 1 + floor(random() * (3 * {orders} - 3)); other := 1 + floor(random() * (3 * {orders} - 3));"
        " ordered := 1 + floor(random() * {orders}); customer := 1 + floor(random() * {orders} / 10);"
        " UPDATE shop.items SET quantity = quantity + 1 WHERE id = one;"
        " UPDATE shop.items SET quantity = quantity + 1 WHERE id = other;"
        " UPDATE shop.orders SET status = 's' || n % 5 WHERE id = ordered;"
        " UPDATE shop.customers SET name = name || 'x' WHERE id = customer;"
        " COMMIT; PERFORM pg_sleep(greatest(0, extract(epoch FROM began - clock_timestamp()) + n / rate));"
        " END LOOP; END $$"
    ),
)


def run(
    *, quick: bool, rows: int = 0, seconds: float = 0, runs: int = 0, parts: Sequence[str] = ()
) -> tuple[int, dict[str, Figure]]:
    """Return (runs, figures by key); parts that are not asked for stay unmeasured."""
    runs, parts = runs or (1 if quick else 3), parts or PARTS
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        for number in range(runs):
            if "fresh" in parts:
                load = (QUICK_WARM if quick else WARM, seconds or (QUICK_SECONDS if quick else SECONDS))
                lags = measure_freshness(folder / f"fresh{number}", QUICK_ORDERS if quick else ORDERS, load)
                figures["view_p50_ms"].values.append(quantiles(lags, n=100)[49] * 1e3)
                figures["view_p99_ms"].values.append(quantiles(lags, n=100)[98] * 1e3)
            if "engine" in parts:
                for order in ORDERS_OF_ROWS:
                    place = folder / f"engine{number}-{order}"
                    _measure_engine(place, rows or (QUICK_ROWS if quick else ROWS), figures, order)
                    shutil.rmtree(place)
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "view_p50_ms": Figure("ms", at_most=2_500),
        "view_p99_ms": Figure("ms", at_most=6_000),
        **{f"batch_cost_10m_vs_1m.{order}": Figure("ratio", at_most=1.5) for order in ORDERS_OF_ROWS},
        **{f"incremental_vs_full.{order}": Figure("ratio", at_most=0.05) for order in ORDERS_OF_ROWS},
        **{f"first_build_vs_spark.{order}": Figure("ratio", at_most=2.0) for order in ORDERS_OF_ROWS},
        **{f"step_seconds.{order}": Figure("s") for order in ORDERS_OF_ROWS},
    }


def measure_freshness(folder: Path, orders: int, load: tuple[float, float]) -> list[float]:
    """Return the seconds from commit to visible of each transaction. load: seconds before it is measured, and while."""
    folder.mkdir()
    lake, marts = (f"{folder}/{name}/{{schema}}/{{table}}" for name in ("lake", "marts"))
    sinks = [
        {"type": "delta", "name": "lake", "path": lake},
        {"type": "delta", "name": "marts", "path": marts, "views": ["shop.v_*"]},
    ]
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        prepare(server.dsn(), *(statement.format(orders=orders) for statement in SETUP))
        more = f"sinks: {json.dumps(sinks)}\nviews: {json.dumps([VIEW])}\nexclude: ['shop.v_*']\nservice: {{port: 0}}"
        place = ReaderPlace("views", folder, server.dsn(), "shop.*", "views_pub", more)
        command = ("cdc", "run", "-c", str(place.write()))
        with (
            running_module(folder / "run.out", *command) as process,
            SeenRecords(lambda: Lake.open(marts).published(), tables=1, look_every=LOOK_EVERY) as seen,
        ):
            until(lambda: process.poll() is None and seen.streams(place.durable), 1_200)
            with under_load(server.dsn(), "shop", RATE):
                time.sleep(load[0])
                began = time.time()
                time.sleep(load[1])
                ended = time.time()
            until(lambda: process.poll() is None and seen.position >= (place.durable or 0), 120)
        lags = lags_of(place.log, seen, began, ended)
        with connect(server.dsn()) as conn:
            drop_slot(conn, place.slot)
    if len(lags) < REACHED * RATE * (ended - began):
        raise RuntimeError(f"only {len(lags)} transactions committed in {ended - began:.0f} s")
    return lags


def changed_ids(step: int, rows: Mapping[str, int]) -> dict[str, list[int]]:
    """Return the ids that a step changes in each table: 1,000 of all, anywhere. rows: the rows of each table."""
    random = Random(f"step {step}")
    counts = {"customers": CHANGES // 20, "orders": CHANGES // 4}
    counts["items"] = CHANGES - sum(counts.values())
    return {name: sorted(random.sample(range(rows[name]), min(count, rows[name]))) for name, count in counts.items()}


class _Tables:
    """Three tables that Spark wrote, at STEPS + 1 versions with 1,000 changes between two, and their change log."""

    def __init__(self, folder: Path, spark: SparkSession, items: int, order: str) -> None:
        """order: one of ORDERS_OF_ROWS."""
        folder.mkdir(parents=True)
        self._folder, self._spark, self._order = folder, spark, order
        orders = items // 3
        self._rows = {"customers": orders // 10, "orders": orders, "items": items}
        self._schemas = _schemas()
        self.definition = self._define()
        self._catalog = Catalog.open(self.definition.catalog.url)
        self._write_tables()
        self._write_log()

    def record(self, version: int) -> Published:
        """The published record of the lake at one of the versions."""
        position = _position_of(version)
        tables = {
            relation: TableRecord(
                relation,
                schema.topic,
                self._target(schema.name),
                position,
                version,
                "streaming",
                schema=schema.to_json().decode(),
            )
            for relation, schema in self._schemas.items()
        }
        return Published(position, 0, tables)

    def _target(self, name: str) -> str:
        return f"{self._folder}/lake/shop/{name}"

    def _define(self) -> Definition:
        path = self._folder / "shop.yaml"
        path.write_text(
            "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\n"
            f"tables: [{{match: 'shop.*', exclude: ['shop.v_*']}}]\nlog: {{path: '{self._folder}/log'}}\n"
            f"sinks: [{{type: delta, name: lake, path: '{self._folder}/lake/{{schema}}/{{table}}'}}]\n"
            f"views: {[VIEW]!r}\n"
        )
        return load_definition(path)

    def _write_tables(self) -> None:
        customers = max(1, self._rows["customers"])
        place = "1000L AS _position, id AS _ordinal"
        for name, columns in (
            ("customers", "int(id) AS id, concat('customer ', id) AS name"),
            ("orders", f"int(id) AS id, int(id % {customers}) AS customer_id, 'new' AS status"),
            (
                "items",
                (
                    "int(id) AS id, int(id div 3) AS order_id, int(id % 7) AS quantity,"
                    " cast(id % 100 AS decimal(10, 2)) AS price"
                ),
            ),
        ):
            rows = self._spark.range(0, self._rows[name], 1, 8).selectExpr(*_parts(f"{columns}, {place}"))
            if self._order == UNCLUSTERED:
                rows = rows.repartitionByRange(8, F.xxhash64("id")).sortWithinPartitions(F.xxhash64("id"))
            rows.write.format("delta").save(self._target(name))
        for step in range(1, STEPS + 1):
            changes = {
                "customers": f"name = 'x{step}'",
                "orders": f"status = 'x{step}'",
                "items": f"quantity = {90 + step}",
            }
            ids = changed_ids(step, self._rows)
            for name, change in changes.items():
                self._spark.sql(
                    f"UPDATE delta.`{self._target(name)}` SET {change}, _position = {_position_of(step)}"
                    f" WHERE id IN ({', '.join(map(str, ids[name]))})"
                )

    def _write_log(self) -> None:
        writer = LogWriter.open(self.definition.log.root, IDENTITY, LIMITS)
        first = [
            row(1_000, n, op="s", relation=s.relation, topic=s.topic, key=None, after=None, payload=s.to_json())
            for n, s in enumerate(self._schemas.values())
        ]
        writer.commit(writer.stage(table(*first)), info(1_000))
        for step in range(1, STEPS + 1):
            position, ids = _position_of(step), changed_ids(step, self._rows)
            changes: list[dict[str, Any]] = []
            for schema in self._schemas.values():
                for number in ids[schema.name]:
                    of = {"relation": schema.relation, "topic": schema.topic}
                    changes.append(
                        row(position, len(changes), **of, op="u", key=[str(number)], after=[(1, str(number))])
                    )  # type: ignore[arg-type]
            writer.commit(writer.stage(table(*changes)), info(position))

    def engine(self) -> ViewEngine:
        """A new engine over these tables."""
        change_log, sink = LogReader(self.definition.log.root), self.definition.sink_of_view_inputs
        assert sink is not None
        views = open_log_of_views(self.definition, change_log)
        made = ViewEngine(self.definition.views, sink, views, change_log, self._spark.newSession())
        made.patience = _LONGEST
        return made

    def whole(self, version: int) -> str:
        """The SQL of the view over the tables of a version."""
        sql = SQL
        for schema in self._schemas.values():
            sql = sql.replace(
                schema.topic, f"(SELECT * FROM delta.`{self._target(schema.name)}` VERSION AS OF {version})"
            )
        return sql


def _position_of(version: int) -> int:
    return 1_000 * (version + 1)


def _parts(columns: str) -> list[str]:
    """Divide a list of expressions at the commas that are in no parentheses."""
    found, depth = [""], 0
    for character in columns:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == "," and not depth:
            found.append("")
        else:
            found[-1] += character
    return found


def _schemas() -> dict[int, TableSchema]:
    types = {"int": (23, "integer", -1), "text": (25, "text", -1), "price": (1700, "numeric", (10 << 16 | 2) + 4)}
    found = {}
    for relation, (name, columns) in enumerate(
        {
            "customers": {"id": "int", "name": "text"},
            "orders": {"id": "int", "customer_id": "int", "status": "text"},
            "items": {"id": "int", "order_id": "int", "quantity": "int", "price": "price"},
        }.items(),
        1,
    ):
        made = [
            Column(
                id=n, name=c, type_oid=types[t][0], type_name=types[t][1], typmod=types[t][2], key=0 if n == 1 else None
            )
            for n, (c, t) in enumerate(columns.items(), 1)
        ]
        found[relation] = replace(schema_of(relation), name=name, columns=tuple(made))
    return found


def _measure_engine(folder: Path, items: int, figures: dict[str, Figure], order: str) -> None:
    settings = SparkSettings(app_name="views", warehouse=f"{folder}/warehouse", conf={"spark.driver.memory": "4g"})
    spark = spark_session(settings)
    try:
        steps = []
        for size in (items // 10, items):
            tables = _Tables(folder / str(size), spark, size, order)
            engine = tables.engine()
            build = _seconds(lambda: engine.advance(tables.record(0), SOURCE))  # noqa: B023 - called at once
            steps.append(median(_step_seconds(engine, tables.record(step)) for step in range(1, STEPS + 1)))
        out = f"{folder}/peer"
        peer = _seconds(lambda: spark.sql(tables.whole(0)).write.format("delta").save(out))
        full = _seconds(lambda: spark.sql(tables.whole(STEPS)).write.format("noop").mode("overwrite").save())
    finally:
        spark.stop()
    figures[f"first_build_vs_spark.{order}"].values.append(build / peer)
    figures[f"batch_cost_10m_vs_1m.{order}"].values.append(steps[1] / steps[0])
    figures[f"incremental_vs_full.{order}"].values.append(steps[1] / full)
    figures[f"step_seconds.{order}"].values.append(steps[1])


def _step_seconds(engine: ViewEngine, record: Published) -> float:
    seconds, figure = _seconds(lambda: engine.advance(record, SOURCE)), engine.figures["shop.v_documents"]
    if figure.state != "live" or not figure.changed_rows or not figure.work.affected_keys:
        raise RuntimeError(f"the view was not computed from changes: {figure}")
    return seconds


def _seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began
