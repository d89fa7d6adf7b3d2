"""Both ways of a batch: applied on the driver or by executors, a sink has the same rows, positions and dead letters."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import DeltaSinkDefinition, EngineChoice, load_definition
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableSchema
from cdc.target_names import RELATION_COLUMN
from cdc.targets.lake_reader import read_target
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from tests.fixtures.catalog import put_catalog
from tests.fixtures.spark import compiling
from tests.log.rows import schema_of
from tests.pipelines.cold_log import SPREAD, append, log_writer, transactions
from tests.pipelines.fold_model import PLAIN, Row, Source, log_row
from tests.pipelines.shop_pipeline import FIGURES

EXAMPLES = int(os.environ.get("CDC_BOTH_WAYS_EXAMPLES", "1"))
"""Random logs that are applied both ways; 500 are the proof, and take hours."""
TABLES = 2
BATCHES = 2
UNFIT, RARE = 0.08, 0.3
"""Shares of values that do not fit, and of the model's truncates and copies that happen."""
KEYS = [str(number) for number in range(1, 25)]


class ManyKeys(Source):
    """A random history of a table with two dozen keys, some of whose values do not fit their column."""

    unfit = UNFIT

    def _free(self) -> list[str]:
        return [key for key in KEYS if key not in self.table]

    def _value(self) -> str | None:
        return "" if self.random.random() < self.unfit else super()._value()

    def _truncate(self) -> None:
        if self.random.random() < RARE:
            super()._truncate()

    def _copy(self) -> None:
        if self.random.random() < RARE:
            super()._copy()


def schema(relation: int) -> TableSchema:
    """A table whose column `plain` is an integer: the model's empty text does not fit."""
    made = schema_of(relation, "plain", "large", "more")
    columns = (
        replace(column, type_oid=23, type_name="integer") if column.id == PLAIN else column for column in made.columns
    )
    return replace(made, name=f"table{relation}", columns=tuple(columns))


def random_log(random: Random, tables: int = TABLES, source_of: type[Source] = ManyKeys) -> list[list[Row]]:
    """The transactions of several tables; no two tables have a position in common."""
    rows: list[Row] = []
    for relation in range(1, tables + 1):
        source = source_of(relation, Random(random.random()))
        for _ in range(random.randint(6, 30)):
            source.transaction()
        topic, made = f"shop.table{relation}", schema(relation)
        begin = log_row(relation, (9, 0), "s", payload=made.to_json())
        copied = log_row(relation, (9, 1), "g", payload=b"9")
        for row in [begin, copied, *source.log]:
            moved = row | {"topic": topic, "position": row["position"] * SPREAD + relation}
            if row["op"] == "g":
                moved["payload"] = str(int(row["payload"]) * SPREAD).encode()
            if moved["address"] is not None and moved["address"] != "theirs":
                moved["address"] = "lake"
            rows.append(moved)
    return transactions(sorted(rows, key=lambda row: (row["position"], row["ordinal"])))


@contextmanager
def loop_in(
    folder: Path,
    log: Path,
    spark: SparkSession | None,
    build: Callable[[DeltaSinkDefinition], Sink] = build_sink,
    rules: str = "[]",
    *,
    engine: EngineChoice = EngineChoice.SPARK,
    lake: str = "",
) -> Iterator[SinkLoop]:
    """The loop of a Delta sink in a folder; with engine `spark` every row stays on the executors.

    rules: `rules` of the sink, as YAML; FOLDER in it is the folder. lake: where the targets are if not in the folder.
    """
    folder.mkdir(exist_ok=True)
    lake, rules = lake or f"{folder}/lake", rules.replace("FOLDER", str(folder))
    (folder / "shop.yaml").write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{log}'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{lake}/{{schema}}/{{table}}', rules: {rules}}}]\n"
    )
    put_catalog(folder)
    definition = load_definition(folder / "shop.yaml")
    wanted = definition.sinks[0]
    assert isinstance(wanted, DeltaSinkDefinition)
    sink, fold = build(wanted), RangeFolder(LogReader(log), wanted.name, wanted.tables, wanted.keeps_history)
    if spark is not None:
        sink.attach(spark)
        fold.choice, fold.collected_rows = engine, 0
    with Catalog.open(definition.catalog.url) as catalog:
        loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", FIGURES))
        loop.open()
        try:
            yield loop
        finally:
            loop.drain()
            sink.close()


def rows_of(loop: SinkLoop) -> dict[str, list[Row]]:
    """The rows of every target, with their positions, by key."""
    tables = loop.record.tables.values()
    read = {table: pa.table(read_target(table.target, table.version)) for table in tables if table.target}
    own = {
        table.topic: [row for row in rows.to_pylist() if row.get(RELATION_COLUMN) in (None, table.relation)]
        for table, rows in read.items()
    }
    return {topic: sorted(rows, key=in_target_order) for topic, rows in own.items()}


def in_target_order(row: Row) -> tuple[Any, ...]:
    """By position and ordinal, which all rows of a table have, and by the start of a version."""
    return row["_position"], row["_ordinal"], row.get("__START_AT", 0), row["id"]


def records_of(loop: SinkLoop) -> list[tuple[Any, ...]]:
    """What the published record says of every table."""
    tables = loop.record.tables.values()
    return sorted((t.topic, t.position, t.state, t.reason, t.parked, t.schema) for t in tables)


def parked_in(loop: SinkLoop) -> list[Any]:
    """The dead letters of the sink, without the time of their first attempt."""
    return [replace(row, first_at=0) for row in loop.quarantine.rows]


def tripled(rows: pa.Table) -> pa.Table:
    """A function of a rule."""
    position = rows.schema.get_field_index("plain")
    return rows.set_column(position, rows.schema.field(position), pc.multiply(rows["plain"], pa.scalar(3, pa.int32())))


RULES = {
    "no rule": "[]",
    "where": "[{match: shop.*, transform: {where: 'plain % 3 <> 0 OR length(large) > 1'}}]",
    "where of sent columns": "[{match: shop.*, transform: {where: 'plain % 3 <> 0', drop: [more]}}]",
    "computed": "[{match: shop.*, transform: {computed: {all: 'concat(large, more)'}, mask: {more: redact}}}]",
    "computed partition": "[{match: shop.*, partition_by: [d], transform: {computed: {d: large}, where: plain > 9}}]",
    "shared": "[{match: shop.*, path: FOLDER/all, merge_tables: true}]",
    "shared and computed": "[{match: shop.*, path: FOLDER/all, merge_tables: true, transform: {where: plain > 9}}]",
    "failing": "[{match: shop.table1, transform: {computed: {part: '100 / (plain - 7)'}}}]",
    "python": f"[{{match: shop.*, transform: {{python: '{__name__}:tripled'}}}}]",
    "python of complete rows": f"[{{match: shop.*, transform: {{python: '{__name__}:tripled', drop: [large, more]}}}}]",
}


def appended_batches(random: Random, writer: LogWriter, waiting: list[list[Row]]) -> Iterator[Position]:
    """Append transactions to a log in batches of random size; yield the end of each batch."""
    for batch in range(BATCHES):
        size = len(waiting) if batch == BATCHES - 1 else random.randint(1, max(1, len(waiting) // 2))
        own, waiting = waiting[:size], waiting[size:]
        if not own:
            return
        append(writer, own)
        yield Position(own[-1][-1]["position"])


def run_both_ways(spark: SparkSession, seed: int, rules: str) -> None:
    """Apply a random log both ways, batch by batch, and compare all results."""
    random, spark = Random(seed), compiling(spark)
    with TemporaryDirectory() as root:
        folder, log = Path(root), Path(root, "log")
        writer, waiting = log_writer(log), random_log(random)
        with (
            loop_in(folder / "here", log, spark, rules=rules, engine=EngineChoice.HERE) as here,
            loop_in(folder / "spark", log, spark, rules=rules) as there,
        ):
            for end in appended_batches(random, writer, waiting):
                here(None, end)
                there(spark, end)
                assert rows_of(there) == rows_of(here)
                assert parked_in(there) == parked_in(here)
                assert records_of(there) == records_of(here)


@pytest.mark.usefixtures("with_delta")
@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), rules=st.sampled_from(sorted(RULES)))
def test_both_ways_have_the_same_rows_positions_and_dead_letters(spark: SparkSession, seed: int, rules: str) -> None:
    run_both_ways(spark, seed, RULES[rules])
