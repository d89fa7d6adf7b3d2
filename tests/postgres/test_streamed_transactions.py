"""Streamed transactions of real servers: through the spool they equal what protocol 1 sends of the same WAL."""

from __future__ import annotations

from collections.abc import Callable
from typing import LiteralString

import pytest

from cdc.capture.spool import Spool
from cdc.errors import PreflightFailed
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import parse_frame
from cdc.pgoutput.messages import Insert, Keepalive, Message, Relation, Type
from cdc.pgoutput.stream_blocks import START, kind_of
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.publication import ensure_publication
from cdc.postgres.replication import LargeTransactions, OriginFilter, ReplicationStream, StreamOptions
from cdc.postgres.slot import create_slot
from cdc.postgres.tables import TableName
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until

SMALL = "?options=-c%20logical_decoding_work_mem%3D64kB"


def make_source(dsn: str) -> tuple[str, str]:
    """A table, a publication, and two slots from the same place."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    name = dsn.rpartition("/")[2]
    with connect(dsn) as conn:
        ensure_publication(conn, "pub", [TableName("public", "t")])
    slots = f"{name}_a", f"{name}_b"
    for slot in slots:
        with create_slot(dsn, slot):
            pass
    return slots


def received(dsn: str, slot: str, large: LargeTransactions) -> tuple[list[object], int]:
    """Messages up to the one that says end, descriptions left out, and how many parts of unfinished ones."""
    spool, messages, parts = Spool(None), list[object](), list[bytes]()
    options = StreamOptions(slot=slot, publication="pub", start=Lsn(0), large=large)
    with ReplicationStream.open(dsn + SMALL, options) as stream:

        def ended() -> bool:
            if (frames := stream.receive(0.5)) is not None:
                parts.extend(frame for frame in frames if kind_of(frame) == START)
                messages.extend(parse_frame(one) for whole in spool.committed(frames) for one in whole)
            return any(isinstance(m, Message) and m.prefix == "end" for m in messages)

        until(ended, lambda: f"the end, after {len(messages)} messages", every=0)
    spool.close()
    return [_still(m) for m in messages if not isinstance(m, Keepalive | Relation | Type)], len(parts)


def _still(message: object) -> object:
    """Without the time of sending, which no two sessions share."""
    if isinstance(message, Message):
        return Message(message.transactional, message.lsn, message.prefix, message.content, 0)
    return message


def compared(dsn: str, work: Callable[[], None]) -> list[object]:
    """What both protocols make of the work, which must be the same and must have been streamed."""
    first, second = make_source(dsn)
    work()
    with connect(dsn) as conn:
        emit_message(conn, "end", "")
    streamed, parts = received(dsn, first, LargeTransactions.STREAMED)
    whole, none = received(dsn, second, LargeTransactions.WHOLE)
    assert parts > 0
    assert none == 0
    assert streamed == whole
    return streamed


def inserted(messages: list[object]) -> list[int]:
    return [int(str(m.new[0])) for m in messages if isinstance(m, Insert)]


def test_a_large_transaction_equals_what_protocol_1_sends(either_database: str) -> None:
    def work() -> None:
        run_sql(either_database, "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 4000) i")

    assert inserted(compared(either_database, work)) == list(range(1, 4001))


def test_savepoints_half_rolled_back_leave_exactly_the_surviving_rows(either_database: str) -> None:
    def work() -> None:
        with connect(either_database, autocommit=False) as conn:
            for number in range(100):
                conn.execute("SAVEPOINT s")
                conn.execute(
                    "INSERT INTO t SELECT %s * 100 + i, repeat('x', 200) FROM generate_series(1, 20) i", [number]
                )
                conn.execute("ROLLBACK TO SAVEPOINT s" if number % 2 else "RELEASE SAVEPOINT s")
            conn.commit()

    kept = [number * 100 + i for number in range(0, 100, 2) for i in range(1, 21)]
    assert inserted(compared(either_database, work)) == kept


def test_transactions_of_two_connections_come_apart_in_the_order_of_their_commits(either_database: str) -> None:
    rows: LiteralString = "INSERT INTO t SELECT %s + i, repeat('x', 200) FROM generate_series(1, 300) i"

    def work() -> None:
        with connect(either_database, autocommit=False) as one, connect(either_database, autocommit=False) as two:
            for block in range(8):
                one.execute(rows, [block * 1000])
                two.execute(rows, [100_000 + block * 1000])
                run_sql(either_database, "UPDATE t SET v = 'small' WHERE false")
            two.commit()
            one.commit()

    found = inserted(compared(either_database, work))
    assert found == sorted(found, key=lambda number: number < 100_000)


def test_a_rolled_back_transaction_leaves_nothing(either_database: str) -> None:
    def work() -> None:
        with connect(either_database, autocommit=False) as conn:
            conn.execute("INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, 1500) i")
            run_sql(either_database, "INSERT INTO t VALUES (900001, 'small')")
            conn.rollback()
        run_sql(either_database, "INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(5001, 6500) i")

    assert inserted(compared(either_database, work)) == [900001, *range(5001, 6501)]


def test_ddl_and_messages_in_a_transaction_keep_their_order(either_database: str) -> None:
    def work() -> None:
        with connect(either_database, autocommit=False) as conn:
            conn.execute("INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(1, 800) i")
            conn.execute("SELECT pg_logical_emit_message(true, 'inside', 'a')")
            conn.execute("SELECT pg_logical_emit_message(false, 'at once', 'b')")
            conn.execute("ALTER TABLE t ADD COLUMN w text DEFAULT 'w'")
            conn.execute("INSERT INTO t SELECT i, repeat('x', 200), 'w' FROM generate_series(801, 1600) i")
            conn.commit()

    messages = compared(either_database, work)
    inserts = [m for m in messages if isinstance(m, Insert)]
    assert [len(m.new) for m in inserts] == [2] * 800 + [3] * 800
    prefixes = [m.prefix for m in messages if isinstance(m, Message)]
    assert prefixes == ["at once", "inside", "end"]
    assert messages.index(inserts[0]) > 0


def test_origin_none_is_asked_of_servers_that_know_it() -> None:
    options = StreamOptions(slot="s", publication="p", start=Lsn(0), origin=OriginFilter.NONE)
    assert "origin 'none'" in options.command(160_000)
    with pytest.raises(PreflightFailed, match="16"):
        options.command(150_018)


def test_the_best_protocol_of_the_server_is_asked_for() -> None:
    options = StreamOptions(slot="s", publication="p", start=Lsn(0))
    assert "proto_version '2', streaming 'on'" in options.command(150_018)
    assert "proto_version '4', streaming 'parallel'" in options.command(180_000)
    assert "two_phase" not in options.command(180_000)
