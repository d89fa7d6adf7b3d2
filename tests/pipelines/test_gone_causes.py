"""A table that stopped goes on by itself once the log has a version of it that its target can follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from cdc import metrics
from cdc.catalog import Catalog
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.snapshot.reader_with_backfills import Running


class Driver:
    """The driver of one Delta sink, which opens it again when the loop says so, as the apply process does."""

    def __init__(self, captured: Captured, catalog: Catalog) -> None:
        self._held, self._catalog = captured, catalog
        self._place = f"{captured.folder}/lake/{{schema}}/{{table}}"
        self._loop: SinkLoop | None = None

    def advance(self) -> TableRecord:
        """Bring the sink to the end of the log, and give its one table."""
        again = True
        while again:
            loop = self._loop or self._opened()
            loop(None, self._held.log.durable or Position(0))
            again = loop.needs_reopen
            if again:
                self.stop()
        published = Lake.open(self._place).published()
        assert published is not None
        (record,) = published.tables.values()
        return record

    def rows(self, record: TableRecord) -> list[dict[str, Any]]:
        found = read_target(record.target, record.version).read_all().to_pylist()
        plain = [{name: value for name, value in row.items() if not name.startswith("_")} for row in found]
        return sorted(plain, key=lambda row: row["id"])

    def stop(self) -> None:
        if self._loop is not None:
            self._loop.drain()
            self._sink.close()
            self._loop = None

    def _opened(self) -> SinkLoop:
        self._sink = DeltaSink(DeltaSettings("lake", self._place))
        fold = RangeFolder(LogReader(self._held.folder / "log"), "lake", ("*.*",))
        progress = SinkFigures("held", "lake", metrics.Metrics())
        self._loop = SinkLoop(self._sink, fold, CutRequests(self._catalog, "lake"), progress)
        self._loop.open()
        for table in self._loop.lagging_tables:
            self._loop.catch_up(table, None)
        return self._loop


@contextmanager
def driven(captured: Captured) -> Iterator[Driver]:
    with Catalog.open(captured.definition.catalog.url) as catalog, closing(catalog):
        driver = Driver(captured, catalog)
        try:
            yield driver
        finally:
            driver.stop()


CURES = {
    "dropped": 'ALTER TABLE t DROP COLUMN "A"',
    "renamed": 'ALTER TABLE t RENAME COLUMN "A" TO other',
    "dropped, and the table renamed": 'ALTER TABLE t DROP COLUMN "A"; ALTER TABLE t RENAME TO u',
}


def changed(captured: Captured, *statements: str) -> None:
    with Running(captured) as running:
        run_sql(captured.dsn, *statements)
        running.caught_up()


@pytest.mark.parametrize(
    ("cure", "restarted"),
    [
        pytest.param(CURES[name], again, marks=() if again is (name == "renamed") else pytest.mark.slow)
        for name in CURES
        for again in (False, True)
    ],
)
def test_columns_that_differed_in_case_stop_a_table_until_one_of_them_is_gone(
    tmp_path: Path, database: str, cure: str, restarted: bool
) -> None:
    run_sql(database, 'CREATE TABLE t (id int PRIMARY KEY, a int, "A" int)', "INSERT INTO t VALUES (1, 2, 3)")
    captured = Captured(tmp_path, database)
    captured.copy()
    with driven(captured) as driver:
        stopped = driver.advance()
        assert (stopped.state, (stopped.reason or "")[:8]) == (TargetState.FAILED, "CDC-3005")
        if restarted:
            driver.stop()
        name = "u" if "RENAME TO u" in cure else "t"
        changed(captured, *cure.split("; "), f"INSERT INTO {name} (id, a) VALUES (2, 20)")
        record = driver.advance()
        assert (record.state, record.reason) == (TargetState.STREAMING, None)
        assert [(row["id"], row["a"]) for row in driver.rows(record)] == [(1, 2), (2, 20)]
