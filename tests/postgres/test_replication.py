"""ReplicationStream against real servers."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from pathlib import Path

import pytest

from cdc.errors import InvalidDefinition, SlotInUse, SlotMissing, SourceUnreachable
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import FrameBatch, parse_frame
from cdc.pgoutput.messages import BeginMessage, CommitMessage, Insert
from cdc.postgres import copy_data_receiver
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.publication import ensure_publication
from cdc.postgres.replication import (
    LARGE_RECEIVE_BUFFER,
    RECEIVE_BUFFER,
    ReplicationStream,
    StreamOptions,
    _limit_receive_buffer,
    identify_system,
    quote_identifier,
    quote_literal,
)
from cdc.postgres.slot import create_slot, slot_status
from cdc.postgres.tables import TableName
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.waiting import until
from tests.postgres.stream import receive_until

OPTIONS = StreamOptions(slot="stream", publication="pub", start=Lsn(0))

ACTIVE = "SELECT 1 FROM pg_replication_slots WHERE active AND database = current_database()"


def make_source(dsn: str) -> str:
    """A table with a publication and a slot of the database's own name; the slot's name."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)")
    slot = dsn.rpartition("/")[2]
    with connect(dsn) as conn:
        ensure_publication(conn, "pub", [TableName("public", "t")])
    with create_slot(dsn, slot):
        pass
    return slot


def options(slot: str) -> StreamOptions:
    return StreamOptions(slot=slot, publication="pub", start=Lsn(0))


def test_every_change_arrives_once_and_in_order(any_database: str) -> None:
    slot = make_source(any_database)
    run_sql(any_database, "INSERT INTO t SELECT i, repeat('x', i % 300) FROM generate_series(1, 5000) i")

    with ReplicationStream.open(any_database, options(slot)) as stream:
        messages = receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))

    assert [int(str(m.new[0])) for m in messages if isinstance(m, Insert)] == list(range(1, 5001))
    assert isinstance(messages[0], BeginMessage)
    assert stream.received_bytes > 5000


def test_the_server_sends_a_keepalive_when_it_has_no_more_wal(any_database: str) -> None:
    slot = make_source(any_database)
    run_sql(any_database, "INSERT INTO t SELECT i, repeat('x', 100) FROM generate_series(1, 5000) i")

    received: list[FrameBatch] = []
    with ReplicationStream.open(any_database, options(slot)) as stream:

        def has_all() -> bool:
            received.extend(batch for batch in [stream.receive(0.5)] if batch is not None)
            is_committed = any(isinstance(parse_frame(frame), CommitMessage) for batch in received for frame in batch)
            return is_committed and received[-1].ends_with_keepalive

        until(has_all, lambda: f"{len(received)} batches without a keepalive at the end", every=0.0)


def test_a_message_larger_than_every_buffer_arrives_whole(database: str) -> None:
    slot = make_source(database)
    run_sql(database, "INSERT INTO t VALUES (1, repeat('long', 3000000))")

    with ReplicationStream.open(database, options(slot)) as stream:
        messages = receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))

    assert [m.new[1] for m in messages if isinstance(m, Insert)] == ["long" * 3000000]


def test_the_compiled_loop_is_in_use_and_the_plain_one_gives_the_same_frames(database: str) -> None:
    slot = make_source(database)
    run_sql(database, "INSERT INTO t SELECT i, i::text FROM generate_series(1, 50) i")
    taken = []
    for plain in (False, True):
        with ReplicationStream.open(database, options(slot)) as stream:
            assert stream._drain._functions is not None
            if plain:
                stream._drain._functions = None
            taken.append(receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen)))
        until(lambda: rows_of(database, "SELECT 1 FROM pg_replication_slots WHERE active") == [], "the slot free")

    assert taken[0] == taken[1]
    assert copy_data_receiver.load_functions() is not None


def test_the_slot_moves_only_when_something_is_confirmed(either_database: str) -> None:
    slot = make_source(either_database)
    with connect(either_database) as conn, ReplicationStream.open(either_database, options(slot)) as stream:
        before = slot_status(conn, slot)
        assert before is not None
        run_sql(either_database, "INSERT INTO t VALUES (1, 'a')")
        messages = receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))
        assert slot_status(conn, slot).confirmed_flush == before.confirmed_flush  # type: ignore[union-attr]

        confirmed = Lsn(next(m.lsn for m in messages if isinstance(m, CommitMessage)) + 1)
        stream.confirm(confirmed)

        def moved() -> bool:
            stream.receive(0.02)
            return slot_status(conn, slot).confirmed_flush == confirmed  # type: ignore[union-attr]

        until(moved, "the slot to move")


def test_a_confirmation_behind_the_slot_does_not_move_it_back(either_database: str) -> None:
    slot = make_source(either_database)
    with connect(either_database) as conn:
        before = slot_status(conn, slot)
        with ReplicationStream.open(either_database, options(slot)) as stream:
            stream.confirm(Lsn(1))
            emit_message(conn, "x", "y")
            receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))
        until(lambda: not slot_status(conn, slot).active, "the slot free")  # type: ignore[union-attr]

        after = slot_status(conn, slot)

    assert before is not None
    assert after is not None
    assert after.confirmed_flush == before.confirmed_flush


def test_an_idle_stream_outlives_the_servers_timeout(database: str) -> None:
    slot = make_source(database)
    impatient = f"{database}?options=-c%20wal_sender_timeout%3D1500ms"
    with ReplicationStream.open(impatient, options(slot)) as stream:
        begun = time.monotonic()
        while time.monotonic() < begun + 4:
            stream.receive(0.4)
        run_sql(database, "INSERT INTO t VALUES (1, 'a')")

        assert receive_until(stream, lambda seen: any(isinstance(m, Insert) for m in seen))


def test_a_slot_that_is_read_is_in_use(either_database: str) -> None:
    slot = make_source(either_database)
    with ReplicationStream.open(either_database, options(slot)), pytest.raises(SlotInUse, match="is active for PID"):
        ReplicationStream.open(either_database, options(slot))


def test_a_slot_that_is_not_there_is_missing(any_database: str) -> None:
    with pytest.raises(SlotMissing):
        ReplicationStream.open(any_database, options("nowhere"))


def test_a_walsender_that_is_ended_is_unreachable(either_database: str) -> None:
    slot = make_source(either_database)
    with ReplicationStream.open(either_database, options(slot)) as stream:
        run_sql(either_database, "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE active")
        with pytest.raises(SourceUnreachable):
            receive_until(stream, lambda _: False)


def test_nothing_to_receive_is_none_after_the_timeout(database: str) -> None:
    slot = make_source(database)
    with ReplicationStream.open(database, options(slot)) as stream:
        begun = time.monotonic()
        while stream.receive(0.1) is not None:  # keepalives come at any time
            begun = time.monotonic()

        assert time.monotonic() - begun >= 0.1


def test_the_server_reports_its_system_identifier(any_database: str) -> None:
    identity = identify_system(any_database)
    assert identity.database == any_database.rpartition("/")[2]
    assert identity.timeline == 1
    assert identity.wal_end > 0
    assert rows_of(any_database, "SELECT system_identifier::text FROM pg_control_system()") == [(identity.system_id,)]


def test_a_publication_of_any_name_can_be_streamed(either_database: str) -> None:
    slot = either_database.rpartition("/")[2]
    names = ["plain", 'a"b', "a'b", "a,b", "a b", "ü", "back\\slash", "Upper"]
    run_sql(either_database, "CREATE TABLE t (id int PRIMARY KEY)")
    with connect(either_database) as conn:
        for name in names:
            ensure_publication(conn, name, [TableName("public", "t")])
    with create_slot(either_database, slot):
        pass
    run_sql(either_database, "INSERT INTO t VALUES (1)")
    for name in names:
        until(lambda: rows_of(either_database, ACTIVE) == [], "the slot free")
        with ReplicationStream.open(
            either_database, StreamOptions(slot=slot, publication=name, start=Lsn(0))
        ) as stream:
            assert receive_until(stream, lambda seen: any(isinstance(m, Insert) for m in seen)), name


@pytest.mark.parametrize("text", ["", "a\0b"])
def test_an_empty_name_and_a_zero_byte_are_refused(text: str) -> None:
    with pytest.raises(InvalidDefinition):
        quote_identifier(text)


def test_a_literal_without_zero_bytes_only() -> None:
    assert quote_literal("it's") == "'it''s'"
    with pytest.raises(InvalidDefinition):
        quote_literal("\0")


def test_a_connection_that_was_reset_before_its_buffer_is_limited_is_left_to_the_next_command() -> None:
    """Otherwise the reader ended with an error of a file, and did not connect again."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        server, _ = listener.accept()
        server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        server.close()  # sends a reset
        reset = select.poll()
        reset.register(client, select.POLLIN)
        assert reset.poll(10_000)
        with pytest.raises(OSError, match="not connected"):
            client.getpeername()
        assert not _limit_receive_buffer(client.fileno())


def test_the_receive_buffer_grows_with_large_messages_and_stays(database: str) -> None:
    slot = make_source(database)
    buffers = []
    with ReplicationStream.open(database, options(slot)) as stream:
        for length, first, last in ((1, 1, 3000), (3_000_000, -2, -1), (1, 3001, 6000)):
            run_sql(database, f"INSERT INTO t SELECT i, repeat('x', {length}) FROM generate_series({first}, {last}) i")
            receive_until(stream, lambda seen: any(isinstance(m, CommitMessage) for m in seen))
            with socket.socket(fileno=os.dup(stream._pgconn.socket)) as connected:
                buffers.append(connected.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF))

    largest = int(Path("/proc/sys/net/core/rmem_max").read_text(encoding="ascii"))
    small, large = (2 * min(size, largest) for size in (RECEIVE_BUFFER, LARGE_RECEIVE_BUFFER))  # the kernel doubles
    assert buffers == [small, large, large]
