"""A network between reader and server that resets, stalls, trickles, drops and lies: no loss, no half message, no wait
without an end.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from cdc.demo.shop_workload import Workload
from cdc.errors import SlotInUse, SourceUnreachable
from cdc.lsn import Lsn
from cdc.pgoutput.messages import CommitMessage, Insert
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.replication import ReplicationStream, StreamOptions
from tests.faults.proxy import Proxy
from tests.faults.test_kill_reader import Oracle, assert_exact, prepare
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import PATIENCE, until
from tests.postgres.stream import receive_until
from tests.postgres.test_replication import make_source

SILENCE = 1.2
"""Seconds; a short one, so that the tests are."""
IMPATIENT = "?options=-c%20wal_sender_timeout%3D1s"
"""The server gives up on us in this time, and our silence is never shorter than its patience."""
BODY = slice(25, None)
"""Of a frame, behind kind, WAL places and time of sending."""


@pytest.fixture(name="proxy")
def _proxy(postgres: EmbeddedPostgres) -> Iterator[Proxy]:
    with Proxy(postgres.port) as proxy:
        yield proxy


@pytest.fixture(name="slot")
def _slot(database: str) -> str:
    """Of a table of 300 rows, which were written behind it."""
    slot = make_source(database)
    run_sql(database, "INSERT INTO t SELECT i, repeat('x', i) FROM generate_series(1, 300) i")
    return slot


def open_stream(dsn: str, slot: str) -> ReplicationStream:
    """As soon as the server noticed that the one before is gone."""
    options = StreamOptions(slot=slot, publication="pub", start=Lsn(0), silence=SILENCE)

    def opened() -> ReplicationStream | None:
        with suppress(SlotInUse):
            return ReplicationStream.open(dsn, options)
        return None

    return until(opened, "the slot free", every=0.01)


def bodies(stream: ReplicationStream, *, last: bytes = b"") -> list[bytes]:
    """What the frames say, keepalives left out, until one of this kind; without one until the stream fails."""
    found: list[bytes] = []
    with suppress(SourceUnreachable):
        while not found or found[-1][:1] != last:
            found += [bytes(frame)[BODY] for frame in stream.receive(0.1) or () if bytes(frame)[:1] == b"w"]
    return found


def seconds_until_given_up(stream: ReplicationStream) -> float:
    began = time.monotonic()
    with pytest.raises(SourceUnreachable, match="has sent nothing for"):
        receive_until(stream, lambda _: False)
    return time.monotonic() - began


def test_a_message_that_was_cut_anywhere_is_never_given_out(proxy: Proxy, database: str, slot: str) -> None:
    random, dsn = Random(5), proxy.dsn(database)
    with open_stream(dsn, slot) as stream:
        whole = bodies(stream, last=b"C")
    run, size = proxy.passed, sum(map(len, whole))
    for _ in range(12):
        proxy.heal()
        proxy.left = cut = run - random.randrange(1, size)
        with open_stream(dsn, slot) as stream:
            assert proxy.stalled.wait(PATIENCE), cut
            proxy.reset()
            found = bodies(stream)
        assert found == whole[: len(found)], cut
        assert len(found) < len(whole), cut


def test_bytes_that_come_one_by_one_make_the_same_messages(proxy: Proxy, database: str, slot: str) -> None:
    with open_stream(proxy.dsn(database), slot) as stream:
        whole = bodies(stream, last=b"C")
    proxy.piece = 1
    with open_stream(proxy.dsn(database), slot) as stream:
        assert bodies(stream, last=b"C") == whole


@pytest.mark.parametrize("fault", ["frozen", "deaf"])
def test_a_peer_that_is_gone_without_a_word_is_found_by_our_own_timer(
    proxy: Proxy, database: str, slot: str, fault: str
) -> None:
    with open_stream(proxy.dsn(database) + IMPATIENT, slot) as stream:
        bodies(stream, last=b"C")
        getattr(proxy, fault).set()
        assert seconds_until_given_up(stream) < SILENCE + 1


def test_a_peer_that_stalls_in_the_middle_of_a_message_is_found(proxy: Proxy, database: str, slot: str) -> None:
    with open_stream(proxy.dsn(database) + IMPATIENT, slot) as stream:
        bodies(stream, last=b"C")
        proxy.left = 50_000
        run_sql(database, "INSERT INTO t SELECT 1000, string_agg(md5(i::text), '') FROM generate_series(1, 9000) i")
        assert proxy.stalled.wait(PATIENCE)
        assert seconds_until_given_up(stream) < SILENCE + 1


def test_a_quiet_source_is_not_a_peer_that_is_gone(proxy: Proxy, database: str, slot: str) -> None:
    with open_stream(proxy.dsn(database) + IMPATIENT, slot) as stream:
        bodies(stream, last=b"C")
        end = time.monotonic() + 3 * SILENCE
        while time.monotonic() < end:
            stream.receive(0.05)
        run_sql(database, "INSERT INTO t VALUES (1000, 'still there')")
        assert receive_until(stream, lambda seen: any(isinstance(m, Insert) for m in seen))


def test_a_message_that_trickles_for_longer_than_the_silence_arrives(proxy: Proxy, database: str, slot: str) -> None:
    with open_stream(proxy.dsn(database) + IMPATIENT, slot) as stream:
        bodies(stream, last=b"C")
        proxy.piece, proxy.latency = 4000, 0.05
        run_sql(database, "INSERT INTO t SELECT 1000, string_agg(md5(i::text), '') FROM generate_series(1, 9000) i")
        began = time.monotonic()
        messages = receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))
    assert time.monotonic() - began > 2 * SILENCE
    assert [len(str(m.new[1])) for m in messages if isinstance(m, Insert)] == [9000 * 32]


@pytest.fixture(name="away")
def _away(tmp_path: Path, database: str, proxy: Proxy) -> Pipeline:
    """A pipeline behind the proxy; the workload and the oracle stand before it."""
    prepare(Pipeline(tmp_path, database, "away"))
    away = Pipeline(tmp_path, proxy.dsn(database), "away_" + database[-8:])
    away.write()
    return away


@pytest.fixture(name="workload")
def _workload(away: Pipeline, database: str) -> Iterator[Workload]:
    workload = Workload(database, rate=200.0, seed=3)
    yield workload
    workload.stop()
    away.end()


def test_resets_in_the_middle_of_messages_lose_and_double_nothing(
    away: Pipeline, workload: Workload, proxy: Proxy, database: str
) -> None:
    random = Random(17)
    oracle = Oracle(database, away.name)
    reader = away.reader()
    away.wait_for_copy()
    workload.start()
    for _ in range(5):
        away.wait(lambda: proxy.links > 0, "a connection")
        proxy.left = random.randrange(1, 30_000)
        away.wait(proxy.stalled.is_set, "a stall")
        proxy.reset()
        proxy.heal()
        before = away.durable()
        away.wait(lambda before=before: away.durable() > before, "progress")  # type: ignore[misc]
    proxy.piece, proxy.latency = 300, 0.001
    away.wait_for_more(workload, 20)
    workload.stop()
    proxy.heal()
    assert_exact(away, oracle)
    assert reader.poll() is None


@pytest.mark.slow
def test_a_reader_whose_server_is_gone_backs_off_and_comes_back_by_itself(
    away: Pipeline, workload: Workload, proxy: Proxy, database: str
) -> None:
    oracle = Oracle(database, away.name)
    reader = away.reader()
    away.wait_for_copy()
    workload.start()
    away.wait_for_more(workload, 20)
    proxy.down()
    began, attempts = time.monotonic(), 4
    away.wait(lambda: away.output().count("capture is interrupted") >= attempts, f"{attempts} attempts")
    waited = time.monotonic() - began
    assert "CDC-2001" in away.output()
    assert waited > 0.2 + 0.4 + 0.8  # each pause is twice the one before
    away.wait_for_more(workload, 20)
    workload.stop()
    proxy.up()
    assert_exact(away, oracle)
    assert reader.poll() is None


def test_a_reader_ends_when_it_is_told_to_although_its_server_says_nothing_any_more(
    away: Pipeline, workload: Workload, proxy: Proxy
) -> None:
    reader = away.reader()
    away.wait_for_copy()
    workload.start()
    copied = away.durable()
    away.wait(lambda: away.durable() > copied, "the stream")
    proxy.frozen.set()
    away.wait_for_more(workload, 80)  # the reporter asks every second, and hangs
    reader.send_signal(signal.SIGTERM)
    assert reader.wait(PATIENCE) == 0, away.output()


@pytest.mark.slow
def test_a_reader_leaves_a_half_open_connection_within_a_minute_and_goes_on(
    away: Pipeline, workload: Workload, proxy: Proxy, database: str
) -> None:
    oracle = Oracle(database, away.name)
    away.reader()
    away.wait_for_copy()
    workload.start()
    copied = away.durable()
    away.wait(lambda: away.durable() > copied, "the stream")
    proxy.frozen.set()
    began = time.monotonic()
    away.wait(lambda: "has sent nothing for" in away.output(), "the silence noticed")
    assert time.monotonic() - began < 65
    assert rows_of(database, "SELECT 1 FROM pg_stat_replication") is not None
    proxy.reset()
    proxy.heal()
    workload.stop()
    assert_exact(away, oracle)
