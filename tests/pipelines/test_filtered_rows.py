"""A publication with a row filter: a row that comes in has nothing of the one that had its key before it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import DeadLetterSettings
from cdc.log.reader import LogReader
from cdc.targets.lake_reader import read_target
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql

MADE = (
    "CREATE TABLE t (id int PRIMARY KEY, n int, note text)",
    "ALTER TABLE t ALTER note SET STORAGE EXTERNAL",
    "INSERT INTO t SELECT id, 0, repeat(id::text, 3000) FROM generate_series(1, 20) id",
    "CREATE PUBLICATION filtered FOR TABLE t WHERE (id >= 10) WITH (publish_via_partition_root = true)",
)
CHANGES = (
    ("BEGIN; UPDATE t SET id = -10 WHERE id = 10; UPDATE t SET id = 10 WHERE id = 2; COMMIT",),
    ("UPDATE t SET id = -11 WHERE id = 11", "UPDATE t SET id = 11 WHERE id = 3", "UPDATE t SET id = 21 WHERE id = 11"),
)
"""Rows leave by an update, which is sent as a delete, and come by one that is an insert without the large note."""


def test_a_row_that_comes_in_without_what_did_not_change_waits_for_it(tmp_path: Path, database: str) -> None:
    run_sql(database, *MADE)
    captured = Captured(tmp_path, database)
    captured.write(slot=f"s_{database.rpartition('/')[2]}", more="  publication: {name: filtered}\n")
    captured.copy()
    sinks: list[Sink] = [
        DeltaSink(DeltaSettings("lake", f"{tmp_path}/lake/{{schema}}/{{table}}")),
        SearchSink("find", tmp_path / "find", dead_letters=DeadLetterSettings()),
    ]
    with Catalog.open(captured.definition.catalog.url) as catalog, ExitStack() as opened:
        loops = []
        for sink in sinks:
            fold = RangeFolder(LogReader(tmp_path / "log"), sink.name, ("*.*",))
            loops.append(
                SinkLoop(sink, fold, CutRequests(catalog, "held"), SinkFigures("held", sink.name, metrics.Metrics()))
            )
            loops[-1].open()
            opened.callback(sink.close)
            opened.callback(loops[-1].drain)
        for changes in ((), *CHANGES):
            run_sql(database, *changes)
            captured.stream()
            for loop in loops:
                loop.advance()
        lacking = [next(iter(loop._published.tables.values())) for loop in loops]
    assert [sorted(record.parked) for record in lacking] == [[("10",), ("21",)]] * 2
    rows = read_target(lacking[0].target, lacking[0].version).read_all().to_pylist()
    assert {row["id"]: row["note"] for row in rows if row["id"] > 11} == {n: str(n) * 3000 for n in range(12, 21)}
