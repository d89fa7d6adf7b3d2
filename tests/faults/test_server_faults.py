"""A server that crashes, ends its walsenders, turns us away, is full, or has a clock that jumps: no loss, no double,
and an error that says what it is.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest

from cdc.errors import PreflightFailed, SourceRejectsConnection
from cdc.log_row import Operation
from cdc.lsn import Lsn
from cdc.pgoutput.messages import Insert
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.preflight import SourceRequirements, preflight
from cdc.postgres.replication import ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot, slot_status
from tests.faults.capture import Captured, ReaderProcess
from tests.faults.test_kill_reader import Oracle, assert_exact
from tests.faults.write_load import TABLE, Load
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import fresh_database, rows_of, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION
from tests.fixtures.waiting import PATIENCE, until
from tests.postgres.stream import receive_until
from tests.postgres.test_replication import make_source

SETTINGS = {"max_wal_senders": "3", "max_replication_slots": "4", "logical_decoding_work_mem": "64kB"}
HUGE = 15_000
"""Rows; some 7 MB of WAL, which are sent while they are written."""
SCRAM = "host all guarded 127.0.0.1/32 scram-sha-256\n"


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """With few places, asking one role for its password; a test may crash it."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("own"), version=MAIN_VERSION, settings=SETTINGS, tcp=True) as server:
        rules = server.data_directory / "pg_hba.conf"
        rules.write_text(SCRAM + rules.read_text())
        run_sql(server.dsn(), "SELECT pg_reload_conf()")
        yield server


@pytest.fixture(name="database")
def _database(server: EmbeddedPostgres) -> Iterator[str]:
    yield from fresh_database(server)


@pytest.fixture(name="loaded")
def _loaded(pipeline: Pipeline) -> Pipeline:
    run_sql(pipeline.dsn, TABLE)
    pipeline.write(tables="public.*")
    return pipeline


def rows_in_log(held: Captured, xid: int) -> int:
    log = held.log
    batches = log.rows(Position(0), log.durable or Position(0))
    return sum(batch.column("xid").to_pylist().count(xid) for batch in batches)


@pytest.mark.parametrize("moment", ["while it is written", pytest.param("after its commit", marks=pytest.mark.slow)])
def test_sigterm_in_the_middle_of_a_huge_transaction_leaves_nothing_of_it_half(
    tmp_path: Path, database: str, moment: str
) -> None:
    run_sql(database, TABLE)
    held = Captured(tmp_path, database)
    held.copy()
    streamed = "SELECT stream_bytes > 1000000 FROM pg_stat_replication_slots WHERE stream_bytes > 1000000"
    with (
        ReaderProcess(held) as reader,
        connect(database, autocommit=False) as writing,
        connect(database) as looking,
    ):
        until(lambda: bool(looking.execute("SELECT 1 FROM pg_stat_replication").fetchone()), "the stream")
        writing.execute("INSERT INTO t SELECT i, repeat('x', 400) FROM generate_series(1, %s) i", [HUGE])
        found = writing.execute("SELECT pg_current_xact_id()::text::bigint").fetchone()
        until(lambda: bool(looking.execute(streamed).fetchone()), "the transaction sent")
        if moment == "after its commit":
            writing.commit()
        reader.child.send_signal(signal.SIGTERM)
        assert reader.child.wait(PATIENCE) == 0, reader.output()
        slot = slot_status(looking, held.slot)
    assert found is not None
    assert slot is not None
    assert rows_in_log(held, found[0]) in ({0, HUGE} if moment == "after its commit" else {0})
    assert (slot.confirmed_flush or 0) <= (held.log.durable or Position(0)).lsn + 1

    held.stream()
    assert rows_in_log(held, found[0]) == HUGE


def test_a_server_that_crashes_under_load_loses_and_doubles_nothing(server: EmbeddedPostgres, loaded: Pipeline) -> None:
    reader = loaded.reader()
    loaded.wait_for_copy()
    oracle = Oracle(loaded.dsn, loaded.name)
    with Load(loaded.dsn) as load:
        for _ in range(2):
            written = load.transactions
            loaded.wait(lambda written=written: load.transactions > written + 25, "load")  # type: ignore[misc]
            server.stop("immediate")
            server.start()
            durable = loaded.durable()
            loaded.wait(lambda durable=durable: loaded.durable() > durable, "progress")  # type: ignore[misc]
    assert_exact(loaded, oracle)
    assert sum(oracle.changes().values()) > 2 * 25
    assert reader.poll() is None


def test_a_walsender_that_is_ended_every_second_costs_nothing_but_time(loaded: Pipeline) -> None:
    reader = loaded.reader()
    loaded.wait_for_copy()
    oracle = Oracle(loaded.dsn, loaded.name)
    end = "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots WHERE active"
    with Load(loaded.dsn):
        for _ in range(2):
            durable, due = loaded.durable(), time.monotonic() + 1
            loaded.wait(lambda durable=durable: loaded.durable() > durable, "progress")  # type: ignore[misc]
            loaded.wait(lambda due=due: time.monotonic() > due, "a second")  # type: ignore[misc]
            loaded.wait(lambda: rows_of(loaded.dsn, end) == [(True,)], "a walsender to end")
    assert_exact(loaded, oracle)
    assert sum(oracle.changes().values()) > 2 * 50
    assert reader.poll() is None


@pytest.fixture(name="guarded")
def _guarded(server: EmbeddedPostgres, database: str) -> Iterator[str]:
    """DSN of a role that needs a password."""
    run_sql(
        server.dsn(), "DROP ROLE IF EXISTS guarded", "CREATE ROLE guarded LOGIN REPLICATION SUPERUSER PASSWORD 'one'"
    )
    yield database.replace("postgres@", "guarded:one@")
    with connect(database) as conn:
        conn.execute("REASSIGN OWNED BY guarded TO postgres; DROP OWNED BY guarded")


def test_a_role_that_is_turned_away_keeps_its_stream_and_is_told_why_at_the_next(database: str, guarded: str) -> None:
    slot = make_source(database)
    options = StreamOptions(slot=slot, publication="pub", start=Lsn(0))
    with ReplicationStream.open(guarded, options) as stream, connect(database) as conn:
        for number, change in enumerate(("NOLOGIN", "VALID UNTIL '2020-01-01'", "PASSWORD 'two'")):
            conn.execute("ALTER ROLE guarded LOGIN VALID UNTIL 'infinity' PASSWORD 'one'")
            conn.execute(f"ALTER ROLE guarded {change}".encode())
            conn.execute("INSERT INTO t VALUES (%s, 'after')", [number])
            assert receive_until(stream, lambda seen: any(isinstance(m, Insert) for m in seen)), change
            with pytest.raises(SourceRejectsConnection) as refused:
                ReplicationStream.open(guarded, options)
            assert "one" not in refused.value.message


def test_a_role_that_has_too_many_connections_is_turned_away_by_name(database: str, guarded: str) -> None:
    run_sql(database, "ALTER ROLE guarded NOSUPERUSER CONNECTION LIMIT 0")
    with pytest.raises(SourceRejectsConnection, match="too many connections for role"):
        connect(guarded)


@pytest.mark.parametrize("primary", [False, True])
def test_a_secret_file_that_changed_gives_the_next_connection_and_a_broken_one_does_not(
    tmp_path: Path, primary: bool
) -> None:
    held = Captured(tmp_path, "host=standby", slot="s")
    if primary:
        held.write(slot="s", more="  primary: {file: dsn}\n")
    else:
        held.path.write_text(held.path.read_text().replace("'host=standby'", "{file: dsn}"))
    secret = tmp_path / "dsn"
    secret.write_text("postgresql://a:one@h/d\n")
    source = held.definition.source
    for text, expected in [("postgresql://a:two@h/d\n", "two"), ("", "one"), ("postgresql://a:x%zz@h/d", "one")]:
        secret.write_text(text)
        assert source.current_primary() == f"postgresql://a:{expected}@h/d"
        assert source.current_dsn() == ("host=standby" if primary else source.current_primary())
    secret.unlink()
    assert source.current_primary() == "postgresql://a:one@h/d"


@pytest.mark.slow
def test_a_rotated_password_is_read_again_from_its_file_without_a_restart(
    tmp_path: Path, database: str, guarded: str
) -> None:
    run_sql(database, TABLE)
    secret, pipeline = tmp_path / "dsn", Pipeline(tmp_path, database, "rotated")
    secret.write_text(guarded)
    secret.chmod(0o600)
    pipeline.write(tables="public.*")
    text = pipeline.definition.read_text()
    pipeline.definition.write_text(text.replace("'${CDC_TEST_DSN}'", "{file: dsn}"))
    reader = pipeline.reader()
    try:
        senders = "SELECT 1 FROM pg_stat_replication"
        pipeline.wait(lambda: pipeline.durable() > 0 and rows_of(database, senders) == [(1,)], "the stream")
        run_sql(database, "INSERT INTO t VALUES (0, 'what the catalogue is asked for')")
        pipeline.settle()
        run_sql(database, "ALTER ROLE guarded PASSWORD 'two'", "INSERT INTO t VALUES (1, 'the stream goes on')")
        pipeline.settle()
        run_sql(
            database, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'guarded'",
            "INSERT INTO t VALUES (2, 'while we were out')",
        )  # fmt: skip
        pipeline.wait(lambda: "CDC-2003" in pipeline.output(), "the refusal")
        assert "password authentication failed" in pipeline.output()
        secret.write_text(guarded.replace(":one@", ":two@"))
        pipeline.settle()
        assert reader.poll() is None
        assert ":one@" not in pipeline.output()
        assert sum(pipeline.changes_by_transaction().values()) == 3
    finally:
        pipeline.end()


def place(dsn: str) -> psycopg.Connection | None:
    """A walsender, None while all are taken, perhaps by one that is on its way out."""
    try:
        return connect(dsn, replication=True)
    except SourceRejectsConnection:
        return None


def test_a_server_without_a_place_for_a_walsender_is_named_and_waited_for(
    database: str, server: EmbeddedPostgres
) -> None:
    """Whether the slot is there or not."""
    slots = (make_source(database), "absent")
    wanted = [SourceRequirements(slot=slot, publication="pub", patterns=["public.*"]) for slot in slots]
    with ExitStack() as places:
        for _ in range(int(SETTINGS["max_wal_senders"])):
            places.enter_context(until(lambda: place(server.dsn()), "a place that another had before"))
        for wants in wanted:
            assert [p.subject for p in preflight(database, wants)] == ["max_wal_senders"]
            with pytest.raises(SourceRejectsConnection, match="max_wal_senders") as refused:
                ReplicationStream.open(database, StreamOptions(slot=wants.slot, publication="pub", start=Lsn(0)))
            assert "max_wal_senders" in refused.value.fix
    until(
        lambda: [preflight(database, wants) for wants in wanted] == [[], []],
        "the server to have noticed that the places are free",
    )


def test_a_server_without_a_place_for_a_slot_is_named(database: str) -> None:
    run_sql(database, TABLE)
    with connect(database) as conn:
        for number in range(int(SETTINGS["max_replication_slots"])):
            conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [f"place_{number}"])
    problems = preflight(database, SourceRequirements(slot="wanted", publication="pub", patterns=["public.*"]))
    assert [p.subject for p in problems] == ["max_replication_slots"]
    with pytest.raises(PreflightFailed, match="53400") as refused, create_slot(database, "wanted", timeout=5):
        pass
    assert "max_replication_slots" in refused.value.fix


def test_the_order_never_depends_on_the_clock(tmp_path: Path, database: str) -> None:
    run_sql(database, TABLE, "INSERT INTO t VALUES (1, 'copied')")
    held = Captured(tmp_path, database)
    held.copy()
    moments = ["2040-01-01 00:00:00+00", "2001-01-01 00:00:00+00", "2030-06-01 00:00:00+00", "2000-01-02 00:00:00+00"]
    origin = held.slot
    with connect(database) as conn:
        conn.execute("SELECT pg_replication_origin_create(%s)", [origin])
        conn.execute("SELECT pg_replication_origin_session_setup(%s)", [origin])
        for number, moment in enumerate(moments):
            with conn.transaction():
                conn.execute("SELECT pg_replication_origin_xact_setup(%s, %s)", [f"0/{number + 1:X}", moment])
                conn.execute("UPDATE t SET v = %s WHERE id = 1", [moment])
        conn.execute("SELECT pg_replication_origin_session_reset()")
        conn.execute("SELECT pg_replication_origin_drop(%s)", [origin])
    held.stream()

    log = held.log
    found = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
    updates = sorted((r["position"], r["committed_at"]) for r in found if r["op"] == Operation.UPDATE.value)
    assert [str(at)[:10] for _, at in updates] == [moment[:10] for moment in moments]
    assert held.folded("t") == [("1", moments[-1])]
