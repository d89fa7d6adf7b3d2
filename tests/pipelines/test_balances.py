"""pgbench's TPC-B beside a copy: whatever a sink publishes, the balances of all tables that stream are the same sum."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pyarrow.compute as pc
import pytest

from cdc import metrics
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.embedded_server import find_binaries
from cdc.snapshot.backfill_documents import BackfillRequest
from cdc.table import TableState
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import Published, TargetState
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql
from tests.snapshot.reader_with_backfills import Running

BALANCES = {
    "public.pgbench_accounts": "abalance",
    "public.pgbench_tellers": "tbalance",
    "public.pgbench_branches": "bbalance",
    "public.pgbench_history": "delta",
}
ACCOUNTS = 1_500
IN_CHUNKS = "snapshot: {beside: 0, chunk_rows: 100, parallel: 2}\n"
RATE = 30
"""Transactions per second: a pace that the merges of a batch keep up with."""
FEW = 40
"""Transactions of a batch at most, while the sink is not far behind."""
SCRIPT = r"""
\set aid random(1, :accounts)
\set bid random(1, 3)
\set tid random(1, 30)
\set delta random(-5000, 5000)
BEGIN;
UPDATE pgbench_accounts SET abalance = abalance + :delta WHERE aid = :aid;
SELECT abalance FROM pgbench_accounts WHERE aid = :aid;
UPDATE pgbench_tellers SET tbalance = tbalance + :delta WHERE tid = :tid;
UPDATE pgbench_branches SET bbalance = bbalance + :delta WHERE bid = :bid;
INSERT INTO pgbench_history (tid, bid, aid, delta, mtime) VALUES (:tid, :bid, :aid, :delta, CURRENT_TIMESTAMP);
END;
"""
"""The built-in one, which knows no fewer accounts than 100,000."""


@pytest.fixture(name="bank")
def _bank(tmp_path: Path, database: str) -> Captured:
    """The bank, of which even small tables are copied in chunks."""
    make_bank(database)
    captured = Captured(tmp_path, database)
    with captured.path.open("a") as definition:
        definition.write(IN_CHUNKS)
    return captured


def make_bank(database: str) -> None:
    """The tables of pgbench with fewer accounts, and a key for the history: a Delta target finds rows by key."""
    subprocess.run([pgbench(), "-i", "-I", "dtp", "--quiet", database], check=True, capture_output=True, timeout=60)
    run_sql(
        database,
        f"INSERT INTO pgbench_accounts SELECT i, 1 + i % 3, 0, '' FROM generate_series(1, {ACCOUNTS}) i",
        "INSERT INTO pgbench_tellers SELECT i, 1 + i % 3, 0 FROM generate_series(1, 30) i",
        "INSERT INTO pgbench_branches SELECT i, 0 FROM generate_series(1, 3) i",
        "ALTER TABLE pgbench_history ADD id bigserial PRIMARY KEY",
    )


def pgbench() -> str:
    """Of the server's own version."""
    return str(find_binaries(18) / "pgbench")


@contextmanager
def paid(captured: Captured) -> Iterator[None]:
    """Three clients pay in and out all the while."""
    script, output = captured.folder / "tpcb.sql", captured.folder / "pgbench.out"
    script.write_text(SCRIPT)
    command = [
        pgbench(),
        "-n",
        "-f",
        str(script),
        "-D",
        f"accounts={ACCOUNTS}",
        "-c",
        "3",
        "-R",
        str(RATE),
        "-T",
        "900",
    ]
    with output.open("wb") as said:
        child = subprocess.Popen([*command, captured.dsn], stdout=said, stderr=said)
    try:
        yield
        assert child.poll() is None, output.read_text()
    finally:
        child.terminate()
        child.wait()


@dataclass
class Auditor:
    """A Delta sink fed with small batches of the log, whose books are read after each of them."""

    log: LogReader
    lake: Lake
    loop: SinkLoop
    random: Random
    seen: set[tuple[str, str]] = field(default_factory=set)
    """Topics and states that were published of them."""
    whole: int = 0
    """Records in which all tables stream."""

    def next(self) -> bool:
        """Apply some transactions that the log holds, and audit what is published of them; False if there are none."""
        self.log.refresh()
        after = self.loop.position
        batches = self.log.rows(after, self.log.latest_boundary(after, None if after else 0))
        ends = sorted({position for batch in batches for position in batch.column("position").to_pylist()})
        if ends:  # of a long log a share, so that a slow machine is not left behind by those who pay
            self.loop(None, Position(self.random.choice(ends[: max(FEW, len(ends) // 8)])))
            self._audit()
        return bool(ends)

    def has_audited(self, records: int) -> bool:
        """Go on as far as the log does; whether that many records were seen in which all tables stream."""
        while self.whole < records and self.next():
            pass
        return self.whole >= records

    def _audit(self) -> None:
        published = self.lake.published()
        assert published is not None
        assert published.position == self.loop.position
        schemas = self.log.schemas(self.loop.position)
        for relation, table in published.tables.items():
            copying = schemas[relation].state is TableState.SNAPSHOTTING
            assert table.state == (TargetState.SNAPSHOTTING if copying else TargetState.STREAMING), table
            self.seen.add((table.topic, table.state))
        sums = self.sums(published)
        assert len(set(sums.values())) <= 1, (self.loop.position, sums)
        self.whole += sums.keys() == BALANCES.keys()

    def sums(self, published: Published) -> dict[str, int]:
        """The balance of each table that streams, at the published version of its target."""
        return {
            table.topic: pc.sum(read_target(table.target, table.version).read_all()[BALANCES[table.topic]]).as_py() or 0
            for table in published.tables.values()
            if table.state == TargetState.STREAMING
        }

    def drain(self) -> None:
        """Apply what the log holds by now."""
        self.log.refresh()
        end = self.log.durable or Position(0)
        while self.loop.position < end:
            self.next()

    def settle(self, captured: Captured) -> None:
        """Apply what is left, when nobody pays any more; the books are those of the source then."""
        while self.next():
            pass
        published = self.lake.published()
        assert published is not None
        ((total, count),) = rows_of(captured.dsn, "SELECT sum(delta), count(*) FROM pgbench_history")
        assert count > 0
        assert self.sums(published) == dict.fromkeys(BALANCES, total)


@contextmanager
def audited(captured: Captured, running: Running) -> Iterator[Auditor]:
    """A sink over the log, and who reads it."""
    template = f"{captured.folder}/lake/{{schema}}/{{table}}"
    log = LogReader(captured.folder / "log")
    with closing(DeltaSink(DeltaSettings("lake", template))) as sink:
        fold = RangeFolder(log, "lake", ("*.*",))
        loop = SinkLoop(
            sink, fold, CutRequests(running.catalog, "held"), SinkFigures("held", "lake", metrics.Metrics())
        )
        loop.open()
        yield Auditor(log, Lake.open(template), loop, Random(0))
        loop.drain()


@pytest.mark.slow
def test_whatever_is_published_beside_a_first_copy_the_balances_of_tables_that_stream_are_equal(bank: Captured) -> None:
    with ExitStack() as load:
        load.enter_context(paid(bank))
        bank.copy()
        with Running(bank) as running, audited(bank, running) as auditor:
            running.until(lambda: auditor.has_audited(5))
            assert ("public.pgbench_accounts", TargetState.SNAPSHOTTING) in auditor.seen
            load.close()
            running.caught_up()
            auditor.settle(bank)


@pytest.mark.slow
@pytest.mark.parametrize("topic", BALANCES)
def test_whatever_is_published_beside_a_resync_the_balances_of_tables_that_stream_are_equal(
    bank: Captured, topic: str
) -> None:
    with ExitStack() as load:
        load.enter_context(paid(bank))
        bank.copy()
        with Running(bank) as running, audited(bank, running) as auditor:
            running.until(lambda: auditor.has_audited(5))
            for _ in range(3):
                ended = running.ended(running.ask(BackfillRequest((topic,), resync=True)))
                assert ended.state == "done", ended.result
                auditor.drain()
            load.close()
            running.caught_up()
            auditor.settle(bank)
