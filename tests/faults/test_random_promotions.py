"""Promotions at random moments under the load of TPC-B: no row is lost or doubled, and no needless copy is made."""

from __future__ import annotations

import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import LiteralString

import pyarrow.compute as pc
import pytest

from cdc.errors import LogError
from cdc.log_row import Operation
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.table import TableState
from tests.faults.capture import Captured, ReaderProcess, rows_with
from tests.fixtures.postgres import open_session, rows_of, run_sql
from tests.fixtures.replicated_postgres import OFTEN, ClusterMember, dsn_of_all
from tests.fixtures.tcp_relay import free_port
from tests.fixtures.waiting import until
from tests.pipelines.apply_thread import ApplyThread, run_verify

SLOT = "cdc_bank"
ROUNDS = 20
CONTINUES_WITHIN = 5.0
KINDS = ("clean switch-over", "crash", "crash with synchronous_commit off", "lagging standby")
TABLES: dict[str, LiteralString] = {
    "pgbench_accounts": "SELECT aid::text, bid::text, abalance::text, filler FROM pgbench_accounts",
    "pgbench_branches": "SELECT bid::text, bbalance::text, filler FROM pgbench_branches",
    "pgbench_history": "SELECT tid::text, bid::text, aid::text, delta::text, mtime::text, filler, id::text "
    "FROM pgbench_history",
    "pgbench_tellers": "SELECT tid::text, bid::text, tbalance::text, filler FROM pgbench_tellers",
    "quiet": "SELECT id::text FROM quiet",
}
IS_SYNCED: LiteralString = "SELECT FROM pg_replication_slots WHERE synced AND NOT temporary"


class Bank:
    """Two machines of one cluster, of which one is the primary; the other one is made again after each promotion."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.ports = folder, (free_port(), free_port())
        self.round = 0
        self.primary = ClusterMember(folder / "0", "member_0", port=self.ports[0])
        self.primary.start()
        programs = self.primary.programs
        subprocess.run(
            [programs / "pgbench", "-i", "-q", "-s", "1", self.primary.dsn()], check=True, capture_output=True
        )
        run_sql(
            self.primary.dsn(),
            "ALTER TABLE pgbench_history ADD COLUMN id bigserial PRIMARY KEY",
            "DELETE FROM pgbench_accounts WHERE aid > 2000",
            "CREATE TABLE quiet (id int PRIMARY KEY)",
            "INSERT INTO quiet VALUES (1)",
        )
        self.standby = self.another_standby()

    def another_standby(self) -> ClusterMember:
        """A standby of the present primary, on the other port, whose worker synchronizes the slot."""
        self.round += 1
        name = f"member_{self.round}"
        folder, port = self.folder / str(self.round), self.ports[self.round % 2]
        standby = ClusterMember(folder, name, primary=self.primary, port=port, syncs_slots=True)
        standby.start()
        return standby

    def set_primary(self, setting: str, value: str) -> None:
        """Change a setting of the primary."""
        open_session(self.primary.dsn()).execute(f"ALTER SYSTEM SET {setting} = '{value}'")  # type: ignore[call-overload]
        run_sql(self.primary.dsn(), "SELECT pg_reload_conf()")

    @contextmanager
    def load(self) -> Iterator[None]:
        """TPC-B until the block ends or the primary stops."""
        arguments = ["-n", "-c", "2", "-T", "600", "-R", "150", "-M", "prepared", self.primary.dsn()]
        process = subprocess.Popen(
            [self.primary.programs / "pgbench", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield
        finally:
            process.terminate()
            process.wait()

    def switch(self) -> None:
        """Promote the standby, and throw the former primary away."""
        former, self.primary = self.primary, self.standby
        self.primary.promote()
        former.close()

    def close(self) -> None:
        self.standby.close()
        self.primary.close()


def is_at(held: Captured, timeline: int, end: Lsn) -> bool:
    """Whether the log has the changes of a timeline up to an LSN."""
    last = held.log.last_commit
    return last is not None and last.timeline == timeline and last.last.lsn >= end


def is_synced(bank: Bank) -> bool:
    """Whether the slot would survive a promotion; a server writes what the slot waits for only every 15 s."""
    run_sql(bank.primary.dsn(), "SELECT pg_log_standby_snapshot()")
    return rows_of(bank.standby.dsn(), IS_SYNCED) != []


class CapturedBank(Captured):
    """The log of a bank, whose definition names both machines."""

    def write(self, *, tables: str = "public.*", slot: str, more: str = "") -> None:
        self.path.write_text(
            f"version: 1\nname: held\nsource:\n  dsn: '{self.dsn}'\n  slot: {{name: {slot}, failover: true}}\n"
            f"  heartbeat: 300ms\n{more}tables: [{{match: '{tables}'}}]\nlog: {{path: '{self.folder}/log'}}\n"
            f"sinks:\n- {{name: lake, type: delta, path: '{self.folder}/lake/{{schema}}/{{table}}'}}\n"
        )

    def has_begun(self) -> bool:
        """Whether the log exists; large tables may still be copied."""
        with suppress(LogError):
            return self.log.durable is not None
        return False

    def copies(self) -> dict[str, int]:
        """How many full copies of each table have ended."""
        ends = rows_with(self.log, pc.field("op") == Operation.GENERATION.value, "topic", "payload")
        found = [row["topic"] for row in ends if int(row["payload"])]
        return {topic: found.count(f"public.{topic}") for topic in TABLES}

    def read_again(self) -> set[str]:
        """The tables whose rows wait to be read again, or were read again, in the present epoch."""
        epoch = (self.log.durable or Position(0)).epoch
        states = (pc.field("op") == Operation.SCHEMA.value) & (pc.field("position") >= int(Position.of(0, epoch)))
        return {str(row["topic"]).removeprefix("public.") for row in rows_with(self.log, states, "topic")}

    def is_live(self) -> bool:
        """Whether no table waits to be read again."""
        return {schema.state for schema in self.log.schemas().values()} == {TableState.LIVE}

    def is_source(self, server: EmbeddedPostgres) -> bool:
        """Whether every table folds to the rows of the server."""
        return all(self.folded(name) == sorted(rows_of(server.dsn(), rows)) for name, rows in TABLES.items())

    def tables_after(self, switch_point: int, epoch: int) -> set[str]:
        """The tables of the transactions that the log had behind the switch point, in an epoch that has ended."""
        first, end = int(Position.of(switch_point - 1, epoch)), int(Position.of(0, epoch + 1))
        behind = (pc.field("position") > first) & (pc.field("position") < end)
        topics = {row["topic"] for row in rows_with(self.log, behind, "topic")}
        return {topic.removeprefix("public.") for topic in topics if topic}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_twenty_promotions_at_random_moments_lose_and_double_nothing(
    tmp_path: Path, postgres: EmbeddedPostgres, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert postgres.version >= 17
    moments, bank = random.Random(seed), Bank(tmp_path / "servers")
    try:
        held = CapturedBank(tmp_path, dsn_of_all(bank.primary, bank.standby), slot=SLOT)
        waits, lossy = [], 0
        with ExitStack() as running:
            reader = running.enter_context(ReaderProcess(held))
            until(held.has_begun, reader.output)
            running.enter_context(ApplyThread(held, reports=("apply",)))
            until(held.is_live, reader.output)  # a copy that ends in a round would count as one of the promotion
            for number in range(ROUNDS):
                kind = KINDS[number % len(KINDS)] if number < len(KINDS) else moments.choice(KINDS)
                seconds, lost = one_promotion(bank, held, kind, moments)
                waits.append(seconds)
                lossy += lost
                until(lambda: held.is_source(bank.primary), reader.output)
                verify_all(held, capsys)
                bank.standby = bank.another_standby()
            assert reader.child.poll() is None
        print([round(seconds, 2) for seconds in waits])
        median = sorted(waits)[ROUNDS // 2]
        print(f"seed {seed}: lost in {lossy} of {ROUNDS}; seconds: max {max(waits):.2f}, median {median:.2f}")
        assert max(waits) < CONTINUES_WITHIN
    finally:
        bank.close()


def verify_all(held: CapturedBank, capsys: pytest.CaptureFixture[str]) -> None:
    """`cdc verify` says that the lake has every row of the source."""
    status, found = run_verify(held, capsys)
    assert status == 0, found
    assert {table["topic"] for table in found["result"]["tables"] if table["equal"]} == {f"public.{t}" for t in TABLES}


def one_promotion(bank: Bank, held: CapturedBank, kind: str, moments: random.Random) -> tuple[float, bool]:
    """Promote the standby; the seconds until the stream continues, and whether the log had lost transactions."""
    lags = kind == "lagging standby"
    bank.set_primary("synchronized_standby_slots", "" if lags else bank.standby.name)
    bank.set_primary("synchronous_commit", "off" if kind.endswith("off") else "on")
    with bank.load():
        until(lambda: is_synced(bank), "the slot at the standby", every=0.3)
        Event().wait(moments.uniform(0.1, 1.5))
        if lags:
            bank.standby.stop("immediate")
            Event().wait(moments.uniform(0.2, 1.0))
        bank.primary.stop("fast" if kind == "clean switch-over" else "immediate")
    before, copies = held.log.durable or Position(0), held.copies()
    if lags:
        bank.standby.start()
    bank.switch()
    began = time.monotonic()
    run_sql(bank.primary.dsn(), "INSERT INTO quiet SELECT max(id) + 1 FROM quiet")
    end = held.wal_end()
    until(lambda: is_at(held, bank.round + 1, end), f"the stream after a {kind}", every=OFTEN)
    seconds = time.monotonic() - began
    last = held.log.last_commit
    assert last is not None
    lost = held.tables_after(last.switch_point, before.epoch) if last.last.epoch > before.epoch else set()
    if not lags:
        assert last.last.epoch == before.epoch, kind
    until(held.is_live, f"the tables of a {kind}")
    assert held.copies() == copies, kind
    if last.last.epoch > before.epoch:
        assert held.read_again() == lost, kind
    return seconds, bool(lost)
