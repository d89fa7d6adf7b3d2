"""Slot ownership in random orders: logs that move, slots and catalogs that change, readers that are killed.

No order loses a row silently, and none moves or drops a slot that the log which is started did not make.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from cdc.capture.startup_checks import check_log
from cdc.catalog import Catalog, TableProgress
from cdc.errors import CdcError, LogError, UnexpectedSlot
from cdc.failpoint import VARIABLE, Abandoned
from cdc.log.reader import LogReader
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.slot import drop_slot, slot_status
from tests.faults.capture import Captured
from tests.fixtures.postgres import drop_when_free
from tests.fixtures.waiting import until

POINTS = ["slot_dropped", "slot_recorded", "slot_created", "after_copy_staged", "after_log_commit", "before_confirm"]
SEQUENCES = [5, pytest.param(500, marks=pytest.mark.slow)]


class Pipeline(Captured):
    """A definition with a log and a catalog in its folder, over the tables of one schema."""

    def write(self, *, tables: str = "public.*", slot: str, more: str = "") -> None:
        schema = tables.partition(".")[0]
        self.path.write_text(
            f"version: 1\nname: {schema}\nsource:\n  dsn: '{self.dsn}'\n  slot: {{name: {slot}}}\n{more}"
            f"tables: [{{match: '{tables}'}}]\nlog: {{path: '{self.folder}/log'}}\n"
            f"catalog: {{url: 'sqlite:///{self.folder}/catalog.db'}}\n"
        )

    def start(self) -> None:
        """What `cdc reader` does, until the log has everything that has committed by now."""
        check_log(self.definition)
        durable = self.stream()
        with Catalog.open(self.definition.catalog.url) as catalog:
            seen = TableProgress("", "t", "streaming", None, int(durable), None, 0)
            catalog.tables.record(self.definition.name, [seen])

    @property
    def log_id(self) -> str | None:
        with suppress(LogError):
            return LogReader(self.folder / "log").log_id
        return None


@contextmanager
def failpoint(point: str) -> Iterator[None]:
    """The reader is abandoned there."""
    os.environ[VARIABLE] = f"{point}:1:abandon"
    try:
        yield
    finally:
        del os.environ[VARIABLE]


class Orders(RuleBasedStateMachine):
    """One table, one slot name, a pipeline and a copy of its definition."""

    def __init__(self, dsn: str, folder: Path) -> None:
        super().__init__()
        self.name = f"s{uuid4().hex[:12]}"
        self.conn = connect(dsn)
        self.conn.execute(f"CREATE SCHEMA {self.name}; CREATE TABLE {self.name}.t (id int PRIMARY KEY, v int)")  # type: ignore[call-overload]
        self.folder = folder / self.name
        self.pipelines = [self.pipeline(dsn, "own"), self.pipeline(dsn, "copied")]
        self.away: list[Path] = []
        self.owner: str | None = None
        self.rows = 0

    def pipeline(self, dsn: str, name: str) -> Pipeline:
        (self.folder / name).mkdir(parents=True)
        return Pipeline(self.folder / name, dsn, tables=f"{self.name}.*", slot=self.name)

    def slot(self) -> tuple[Lsn | None, Lsn | None] | None:
        found = slot_status(self.conn, self.name)
        return None if found is None else (found.confirmed_flush, found.restart_lsn)

    @rule(count=st.integers(1, 3))
    def write_rows(self, count: int) -> None:
        self.rows += count
        self.conn.execute(f"INSERT INTO {self.name}.t SELECT coalesce(max(id), 0) + 1, 0 FROM {self.name}.t")  # type: ignore[call-overload]
        self.conn.execute(f"UPDATE {self.name}.t SET v = v + %s WHERE id %% 2 = 1", [count])  # type: ignore[call-overload]

    @rule(number=st.sampled_from([0, 0, 0, 1]))
    def start(self, number: int) -> None:
        """A reader that ends well has every row; one that may not begin says so and leaves the slot as it is."""
        pipeline, before = self.pipelines[number], self.free_slot()
        may = before is None or (self.owner is not None and self.owner == pipeline.log_id)
        with self.watched(pipeline, before):
            refused = self.refusal(pipeline)
            if refused is not None:
                was_lost = before is None and not is_empty(pipeline)
                assert not may or was_lost, f"{refused.code} {refused.message}"
                assert before is None or not is_empty(pipeline) or isinstance(refused, UnexpectedSlot)
            else:
                truth = self.conn.execute(f"SELECT id::text, v::text FROM {self.name}.t ORDER BY 1").fetchall()  # type: ignore[call-overload]
                assert pipeline.folded("t") == sorted(truth)

    def refusal(self, pipeline: Pipeline) -> CdcError | None:
        """Start it; why it does not, or None."""
        try:
            pipeline.start()
        except CdcError as exc:
            return exc
        return None

    @rule(number=st.sampled_from([0, 0, 0, 1]), point=st.sampled_from(POINTS))
    def start_and_kill(self, number: int, point: str) -> None:
        pipeline = self.pipelines[number]
        with self.watched(pipeline, self.free_slot()), failpoint(point), suppress(CdcError, Abandoned):
            pipeline.start()

    @rule()
    def move_log_away(self) -> None:
        log = self.pipelines[0].folder / "log"
        if log.exists():
            self.away.append(log.rename(self.folder / f"away{len(self.away)}-{uuid4().hex[:6]}"))

    @rule(choice=st.integers(0, 9))
    def put_log_back(self, choice: int) -> None:
        if self.away:
            back = self.away.pop(choice % len(self.away))
            self.move_log_away()
            back.rename(self.pipelines[0].folder / "log")

    @rule()
    def recreate_slot(self) -> None:
        """Somebody else makes a slot of the name."""
        drop_when_free(self.conn, self.name)
        self.conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [self.name])
        self.owner = None

    @rule()
    def drop_slot(self) -> None:
        drop_when_free(self.conn, self.name)
        self.owner = None

    @rule()
    def keep_copy_of_catalog(self) -> None:
        self.copy_catalog("catalog.db", "old.db")

    @rule()
    def restore_catalog(self) -> None:
        self.copy_catalog("old.db", "catalog.db")

    @rule()
    def lose_catalog(self) -> None:
        for left in self.pipelines[0].folder.glob("catalog.db*"):
            left.unlink()

    def copy_catalog(self, one: str, other: str) -> None:
        folder = self.pipelines[0].folder
        if (folder / one).exists():
            shutil.copy(folder / one, folder / other)

    @contextmanager
    def watched(self, pipeline: Pipeline, before: tuple[Lsn | None, Lsn | None] | None) -> Iterator[None]:
        """The slot stays as it is unless the log made it; one that comes to be is the log's."""
        yield
        after = self.free_slot()
        if before is None:
            self.owner = None if after is None else pipeline.log_id
        elif self.owner is None or self.owner != pipeline.log_id:
            assert after == before

    def free_slot(self) -> tuple[Lsn | None, Lsn | None] | None:
        """The slot once the server has noticed that its last reader is gone."""
        until(lambda: not (status := slot_status(self.conn, self.name)) or not status.active, "the slot free")
        return self.slot()

    @invariant()
    def no_draft_is_left(self) -> None:
        left = "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'cdc\\_draft\\_%'"
        until(lambda: self.conn.execute(left).fetchall() == [], "the drafts gone")

    def teardown(self) -> None:
        drop_when_free(self.conn, self.name)
        drop_slot(self.conn, self.name)
        self.conn.execute(f"DROP SCHEMA {self.name} CASCADE; DROP PUBLICATION IF EXISTS cdc_{self.name}_pub")  # type: ignore[call-overload]
        self.conn.close()
        shutil.rmtree(self.folder)


def is_empty(pipeline: Pipeline) -> bool:
    with suppress(LogError):
        return pipeline.log.last_commit is None
    return True


@pytest.mark.timeout(4000)
@pytest.mark.parametrize("sequences", SEQUENCES)
def test_no_order_loses_a_row_silently_or_moves_a_slot_that_is_not_the_logs(
    database: str, tmp_path: Path, sequences: int
) -> None:
    checks = settings(
        max_examples=sequences, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck)
    )
    run_state_machine_as_test(lambda: Orders(database, tmp_path), settings=checks)  # type: ignore[arg-type, no-untyped-call]
