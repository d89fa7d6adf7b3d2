"""Tables of every kind, applied on the driver or by executors that die: the same rows, positions and dead letters."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc import failpoint
from cdc.catalog import Catalog
from cdc.config import DeltaSinkDefinition, EngineChoice, load_definition
from cdc.failpoint import Abandoned
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.fixtures.catalog import put_catalog
from tests.pipelines.cold_log import append, log_writer
from tests.pipelines.fold_model import Row
from tests.pipelines.random_tables import KINDS, Kind, name_of, random_log
from tests.pipelines.shop_pipeline import FIGURES

LOGS = int(os.environ.get("CDC_BOTH_WAYS_LOGS", "1"))
"""Random logs that are applied both ways; 500 are the proof, and take hours."""
FIRST_LOG = int(os.environ.get("CDC_BOTH_WAYS_FIRST_LOG", "0"))
TABLES = 3
"""Tables of a log; each is of another kind."""
BATCHES = 2
KILLS: Final = (
    "after_fold",
    "delta_before_columns",
    "delta_after_columns",
    "delta_before_merge",
    "delta_executor_files",
    "delta_after_merge",
    "after_park",
    "after_table_merge",
    "before_publish",
    "delta_before_publish",
)
"""Where a driver dies."""


@dataclass(frozen=True)
class Lake:
    """One of two lakes of the same log."""

    folder: Path
    log: Path
    kinds: Sequence[Kind]
    engine: EngineChoice
    spark: SparkSession

    def write_definition(self) -> None:
        """Write the definition, with a rule for each table."""
        self.folder.mkdir()
        rules = [
            {"match": f"shop.{name_of(number, kind)}", **kind.rule}
            for number, kind in enumerate(self.kinds, start=1)
            if not kind.is_merged
        ]
        rules.append({"match": "shop.merged*", "path": f"{self.folder}/lake/merged", "merge_tables": True})
        (self.folder / "shop.yaml").write_text(
            "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: 'shop.*'}]\n"
            f"log: {{path: '{self.log}'}}\n"
            f"sinks: [{{type: delta, name: lake, path: '{self.folder}/lake/{{schema}}/{{table}}',"
            f" rules: {json.dumps(rules)}}}]\n"
        )
        put_catalog(self.folder)

    @contextmanager
    def driver(self) -> Iterator[SinkLoop]:
        """A new driver of the lake; with engine `spark` every row stays on the executors that can."""
        definition = load_definition(self.folder / "shop.yaml")
        settings = definition.sinks[0]
        assert isinstance(settings, DeltaSinkDefinition)
        sink = build_sink(settings)
        sink.attach(self.spark)
        fold = RangeFolder(LogReader(self.log), settings.name, settings.tables, settings.keeps_history)
        fold.choice, fold.collected_rows = self.engine, 0
        with Catalog.open(definition.catalog.url) as catalog:
            loop = SinkLoop(sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", "lake", FIGURES))
            loop.open()
            try:
                yield loop
            finally:
                loop.drain()
                sink.close()

    def apply(self, upto: Position, kill: str = "") -> dict[str, Any]:
        """Apply the log up to there by a new driver, after one that dies if it comes to `kill`; return what is there.

        kill: a failpoint and the number of the call.
        """
        if kill:
            point, _, number = kill.partition(":")
            calls = failpoint._passes.get(point, 0) + int(number)
            with pytest.MonkeyPatch.context() as environment, self.driver() as dying:
                environment.setenv(failpoint.VARIABLE, f"{point}:{calls}:abandon")
                with suppress(Abandoned):
                    dying.catch_up_all(self.spark)
                    dying(self.spark, upto)
        with self.driver() as loop:
            loop.catch_up_all(self.spark)
            loop(self.spark, upto)
            return {"rows": rows_of(loop), "dead letters": dead_letters_of(loop), "records": records_of(loop)}

    def settle(self, upto: Position) -> dict[str, Any]:
        """Let one more driver retry the failed tables up to there; return what is there.

        The attempts of a killed driver and of its successor have other ranges. So a table may have been failed in only
        one lake; both apply the whole range that it waits for. What a table that failed again names as its reason, and
        the rows parked in its failed attempts, still depend on their number, and are left out.
        """
        state = self.apply(upto)
        failed = {topic for topic, _, kept, *_ in state["records"] if kept == TargetState.FAILED}
        records = [
            (topic, position, kept, None if topic in failed else reason, *rest)
            for topic, position, kept, reason, *rest in state["records"]
        ]
        letters = [replace(letter, complete=True) for letter in state["dead letters"] if letter.topic not in failed]
        return {**state, "records": records, "dead letters": letters}


def rows_of(loop: SinkLoop) -> dict[str, list[Row]]:
    """The rows of every target, with their positions, in one order."""
    tables = loop.record.tables.values()
    read = {table: pa.table(read_target(table.target, table.version)).to_pylist() for table in tables if table.target}
    # of a target of several tables, each version has the rows of the others as of some moment
    own = {
        table.topic: [row for row in rows if row.get("_relation", table.relation) == table.relation]
        for table, rows in read.items()
    }
    return {topic: sorted(rows, key=repr) for topic, rows in own.items()}


def records_of(loop: SinkLoop) -> list[tuple[Any, ...]]:
    """What the published record says of every table."""
    tables = loop.record.tables.values()
    return sorted((t.topic, t.position, t.state, t.reason, t.parked, t.schema) for t in tables)


def dead_letters_of(loop: SinkLoop) -> list[Any]:
    """The dead letters of the sink, without the time of their first attempt."""
    return [replace(row, first_at=0) for row in loop.quarantine.rows]


def check(spark: SparkSession, kinds: Sequence[Kind], random: Random) -> None:
    """Apply a random log of tables of these kinds both ways, batch by batch, and compare."""
    with TemporaryDirectory() as root:
        log = Path(root, "log")
        here = Lake(Path(root, "here"), log, kinds, EngineChoice.HERE, spark)
        there = Lake(Path(root, "spark"), log, kinds, EngineChoice.SPARK, spark)
        here.write_definition()
        there.write_definition()
        writer, waiting = log_writer(log), random_log(kinds, random)
        for batch in range(BATCHES):
            size = len(waiting) if batch == BATCHES - 1 else random.randint(1, max(1, len(waiting) // 2))
            own, waiting = waiting[:size], waiting[size:]
            append(writer, own)
            end = Position(own[-1][-1]["position"])
            kill = f"{random.choice(KILLS)}:{random.randint(1, 2)}" if random.random() < 0.7 else ""
            expected, applied = here.apply(end), there.apply(end, kill)
            if kill:
                expected, applied = here.settle(end), there.settle(end)
            for what in expected:
                assert applied[what] == expected[what], f"{what} of {[kind.name for kind in kinds]} after {kill!r}"


def random_kinds(random: Random) -> list[Kind]:
    """Kinds of tables, each once, but the one of several tables with one target twice."""
    kinds = random.sample(KINDS, TABLES)
    return kinds + [kind for kind in kinds if kind.is_merged]


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("seed", range(FIRST_LOG, FIRST_LOG + LOGS))
def test_tables_of_every_kind_have_the_same_rows_positions_and_dead_letters(spark: SparkSession, seed: int) -> None:
    random = Random(seed)
    check(spark, random_kinds(random), random)
