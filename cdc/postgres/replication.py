"""The replication stream: receives frames in batches, and confirms positions to Postgres.

psycopg has no replication cursor, so this module implements the loop over COPY BOTH:

- The walsender sends every message separately and wakes the reader for each. To avoid a system call and a thread switch
  per message, the reader waits a moment after the first input (`read_delay.py`). Then libpq reads all input, and one
  compiled loop extracts the messages.
- If Postgres is on the same machine and uses TCP, the reader also limits its receive buffer to RECEIVE_BUFFER until it
  gets large messages. Further messages wait in the send buffer of Postgres, where the kernel joins them to large
  packets. One packet per message costs Postgres twice as much, and Postgres is the bottleneck.
- One thread uses libpq and this class. The caller owns the returned frames.
- A timer sends status updates, with or without input. They contain the confirmed position, never the received one.
  The reply to a keepalive also contains the confirmed position.
- The same timer detects a dead peer, for example behind a firewall that lost the connection. If Postgres has sent
  nothing for some time, the status updates request a reply. A missing reply ends the stream.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import pq

from cdc.errors import CdcError, InvalidDefinition, PreflightFailed, SourceUnreachable
from cdc.lsn import Lsn
from cdc.pgoutput.message_parser import FrameBatch
from cdc.postgres import copy_data_receiver
from cdc.postgres.connection import ANSWER_TIMEOUT, connect, is_standby, server_start
from cdc.postgres.read_delay import BATCH_BYTES, BATCH_PAUSE, STEADY_READ_DELAY, ReadDelay
from cdc.postgres.sql_ascii import disable_encoding_conversion, is_sql_ascii
from cdc.postgres.sqlstate import classify_message, map_errors
from cdc.postgres.timeline_history import TimelineHistory

RECEIVE_BUFFER: Final = 128 << 10
"""Size in bytes of the receive buffer of a TCP connection to the same machine, at first.

The kernel doubles it. Compared with `pg_recvlogical`, TPC-B arrived 2.3 times as fast with 256 KiB, 2.5 times with 64
and 128 KiB, and 1.9 times with 16 KiB. Over a network a small buffer would limit the rate by the round-trip time, and
the kernel joins packets anyway.
"""
LARGE_RECEIVE_BUFFER: Final = 4 << 20
"""Size of the receive buffer once a large batch had large messages: few packets carry them, and Postgres waits less.

The buffer never becomes smaller again: the kernel would drop packets that were sent before, and Postgres would send
them again only after 0.2 s.
"""
READS: Final = 8
"""Maximum number of times that libpq reads before messages are extracted.

Each time libpq reads until no input is left or its buffer is full; it doubles a full buffer the next time.
"""
CONFIRM_INTERVAL: Final = 0.05
"""Minimum seconds between two status updates that only report a new confirmed position."""
TIMEOUT_FRACTION: Final = 3
"""Number of status updates per `wal_sender_timeout`, so that two may be lost."""
SILENCE: Final = 60.0
"""Seconds without input after which the stream fails; the default of `wal_receiver_timeout` is the same.

If `wal_sender_timeout` is longer, it applies instead, because Postgres may be decoding changes that it does not send.
"""
SILENCE_FRACTION: Final = 6
"""Number of status updates per silence limit, the time without input after which the stream fails.

After a third of the silence limit without input, the next update requests a reply. The server then has at least half of
the limit to answer.
"""
PARALLEL_SINCE: Final = 160_000
"""First version of Postgres with protocol 4 and the option `origin`."""

_POSTGRES_EPOCH: Final = 946_684_800_000_000
"""The time 2000-01-01 in microseconds since 1970."""
_STATUS: Final = struct.Struct(">cQQQQB")


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """Result of IDENTIFY_SYSTEM: identity and WAL end of the source server."""

    system_id: str
    timeline: int
    wal_end: Lsn
    """LSN at which the flushed WAL of Postgres ends."""
    database: str
    in_recovery: bool = False
    """True if the server is a standby."""
    started: str = ""
    """Start time of the server, as `server_start` returns it."""
    history: TimelineHistory = field(default_factory=TimelineHistory)
    """The timelines that the server has left; empty on timeline 1, and if the server has lost its history file."""


class LargeTransactions(Enum):
    """Time at which Postgres sends a transaction that exceeds `logical_decoding_work_mem`."""

    #: While it runs, in blocks (protocol 2; from server 16 on protocol 4, whose aborts contain LSN and time).
    STREAMED = "streamed"
    #: At its commit, from spill files of the server (protocol 1).
    WHOLE = "whole"


class OriginFilter(StrEnum):
    """Filter of the transactions that Postgres sends, by replication origin."""

    #: All transactions.
    ANY = "any"
    #: Only transactions without an origin, so none that was replicated from another server; needs server 16 or later.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """Options of START_REPLICATION and of the connection."""

    slot: str
    publication: str
    start: Lsn
    """Start position; Postgres starts at the slot's confirmed position if that is later."""
    status_interval: float = 10.0
    """Maximum seconds between two status updates; shorter if `wal_sender_timeout` is short."""
    silence: float = SILENCE
    """Seconds without input after which the stream fails; longer if `wal_sender_timeout` is longer."""
    large: LargeTransactions = LargeTransactions.STREAMED
    origin: OriginFilter = OriginFilter.ANY

    def command(self, server: int) -> str:
        """Return the START_REPLICATION command for this version of Postgres (`server_version_num`).

        The command never sets `two_phase`, because Postgres would send a prepared transaction before it is known to
        commit. Raises PreflightFailed if this version does not support the origin filter.
        """
        settings = {"publication_names": publication_names_option([self.publication]), "messages": "'true'"}
        if self.large is LargeTransactions.WHOLE:
            settings["proto_version"] = "'1'"
        elif server < PARALLEL_SINCE:
            settings |= {"proto_version": "'2'", "streaming": "'on'"}
        else:
            settings |= {"proto_version": "'4'", "streaming": "'parallel'"}
        if self.origin is not OriginFilter.ANY:
            if server < PARALLEL_SINCE:
                raise PreflightFailed(
                    f"the origin filter {self.origin.value!r} needs server version 16 or later: got {server // 10000}",
                    remedy="capture changes of every origin, or upgrade the server",
                )
            settings["origin"] = f"'{self.origin.value}'"
        options = ", ".join(f"{name} {value}" for name, value in settings.items())
        return f"START_REPLICATION SLOT {quote_identifier(self.slot)} LOGICAL {self.start} ({options})"


def identify_system(dsn: str) -> SystemIdentity:
    """Run IDENTIFY_SYSTEM, after a promotion also TIMELINE_HISTORY, and return the results."""
    with connect(dsn, replication=True, application_name="cdc identify", timeout=ANSWER_TIMEOUT) as conn, map_errors():
        row = conn.execute(b"IDENTIFY_SYSTEM").fetchone()
        assert row is not None  # noqa: S101 - the protocol promises one row
        timeline = int(row[1])
        history = _timeline_history(conn, timeline) if timeline > 1 else TimelineHistory()
        standby, started = is_standby(conn), server_start(conn)
    return SystemIdentity(str(row[0]), timeline, Lsn.parse(row[2]), str(row[3]), standby, started, history)


def _timeline_history(conn: psycopg.Connection, timeline: int) -> TimelineHistory:
    try:
        row = conn.execute(f"TIMELINE_HISTORY {timeline}".encode()).fetchone()
    except psycopg.errors.UndefinedFile:
        return TimelineHistory()
    assert row is not None  # noqa: S101 - the protocol promises one row
    content = row[1]
    return TimelineHistory.parse(content if isinstance(content, str) else bytes(content).decode(errors="replace"))


class ReplicationStream:
    """Stream of frames from one walsender; a context manager, for one thread only."""

    def __init__(
        self, conn: psycopg.Connection, floor: Lsn, interval: float, silence: float, *, is_buffer_limited: bool
    ) -> None:
        """is_buffer_limited: the receive buffer of the connection is limited to RECEIVE_BUFFER."""
        self._conn, self._pgconn = conn, conn.pgconn
        self._drain = copy_data_receiver.CopyDrain(self._pgconn)
        self._floor = floor
        self._interval = interval
        self._silence = silence
        # 0 confirms nothing; never confirm less than the slot's own position
        self._confirmed = self._reported = Lsn(0)
        self._sent_at = self._input_at = time.monotonic()
        self._reply_requested_at: float | None = None  # the first request for a reply since the last input
        self._delay = ReadDelay()
        self._batch_due_at = 0.0
        """Time at which the batch of frames is complete, even if it has few."""
        self._is_buffer_limited = is_buffer_limited
        self._failure: CdcError | None = None
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self.received_bytes = 0
        self.server_start = ""
        """Start time of the server that sends the stream."""

    @classmethod
    def open(cls, dsn: str, options: StreamOptions) -> Self:
        """Connect and start streaming. Raises SlotInUse, SlotMissing, SlotInvalidated and other source errors."""
        copy_data_receiver.load_functions()
        conn = connect(dsn, replication=True, application_name=f"cdc {options.slot}", timeout=ANSWER_TIMEOUT)
        try:
            interval, silence = _intervals(conn, options)
            floor, started = _confirmed_flush(conn, options.slot), server_start(conn)
            if is_sql_ascii(conn):
                with map_errors():
                    disable_encoding_conversion(conn)
            is_limited = _limit_receive_buffer(conn.pgconn.socket)
            answer = conn.pgconn.exec_(options.command(conn.info.server_version).encode())
            if answer.status != pq.ExecStatus.COPY_BOTH:
                raise error_from_result(answer)  # noqa: TRY301 - the connection has to be closed
            conn.pgconn.nonblocking = 1
            stream = cls(conn, floor, interval, silence, is_buffer_limited=is_limited)
            stream.server_start = started
            stream._report()
        except BaseException:
            conn.close()
            raise
        return stream

    def receive(self, timeout: float, gather: float = STEADY_READ_DELAY) -> FrameBatch | None:
        """Return a batch of frames, about 4 MiB at most; None if none is complete within `timeout` seconds.

        gather: seconds between input and read while input arrives steadily and the reader is not behind.

        Raises SourceUnreachable when the stream has ended, or when Postgres has been silent for too long. Raises
        UndecodableWal and other errors of Postgres. Frames that arrived before the error are returned first.
        """
        deadline = time.monotonic() + timeout
        while True:
            self.tick()
            if (frames := self._take()) is not None:
                return frames
            now = time.monotonic()
            if now >= deadline and timeout > 0:
                self._check_silence(now)
                return None
            self._wait_and_read(max(0.0, min(deadline, self._next_report_at()) - now), gather)
            if timeout <= 0:
                return self._take()

    def confirm(self, flushed: Lsn) -> None:
        """Confirm that everything below `flushed` is durable, so that Postgres can remove its WAL.

        A position below an already confirmed position, or below the slot's position at the start, is ignored.
        """
        if flushed >= self._floor:
            self._confirmed = max(self._confirmed, flushed)
        self.tick()

    def tick(self) -> None:
        """Send a status update if one is due; callers use `tick` between calls of `receive`, which does the same."""
        if time.monotonic() >= self._next_report_at():
            self._report()

    def close(self) -> None:
        """Report the last confirmed position, and close the connection; Postgres then releases the slot."""
        if self._conn.closed:
            return
        try:
            if self._failure is None and self._confirmed != self._reported:
                self._report()
        except SourceUnreachable:
            pass  # the server sends unconfirmed transactions again, and the decoder drops them by position
        finally:
            self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> FrameBatch | None:
        """Add the messages that libpq has buffered to the batch, and return the batch if it is complete."""
        drain, now = self._drain, time.monotonic()
        count, nbytes = drain.count, drain.nbytes
        status, reply_requested = drain.collect()
        if drain.count > count:
            self._note_read(drain.count - count, drain.nbytes - nbytes, now)
        if count == 0:
            self._batch_due_at = now + self._delay.batch_seconds
        if reply_requested and self._failure is None:
            self._report()
        has_ended = self._failure is not None or status < copy_data_receiver.PENDING
        if drain.count and (has_ended or drain.nbytes >= BATCH_BYTES or now >= self._batch_due_at):
            self.received_bytes += drain.nbytes
            return drain.take()
        if has_ended:
            raise self._failure or self._end_of_stream()
        return None

    def _note_read(self, count: int, nbytes: int, now: float) -> None:
        self._delay.note(nbytes, count, now)
        if self._is_buffer_limited and self._delay.has_large_messages:
            self._is_buffer_limited = False
            _enlarge_receive_buffer(self._pgconn.socket)

    def _wait_and_read(self, seconds: float, gather: float) -> None:
        """Wait for input, wait a little longer for more input, and read all of it; without input complete the batch."""
        if self._poll.poll(1000 * (min(seconds, BATCH_PAUSE) if self._drain.count else seconds)):
            self._input_at, self._reply_requested_at = time.monotonic(), None
            time.sleep(self._delay.seconds(gather, self._input_at))
            self._read_available()
        else:
            self._batch_due_at = 0.0

    def _check_silence(self, now: float) -> None:
        """Raise SourceUnreachable if Postgres has been silent for too long and has not answered a reply request."""
        silent = now - self._input_at
        if (
            self._reply_requested_at is not None
            and silent >= self._silence
            and now - self._reply_requested_at >= self._silence / 2
        ):
            raise SourceUnreachable(f"the source has sent nothing for {silent:.0f} s and does not answer")

    def _read_available(self) -> None:
        """Read the available input into libpq's buffer, and store an error for `receive`.

        `receive` raises the error after it has returned the frames that arrived before.
        """
        try:
            self._pgconn.consume_input()
            for _ in range(READS):
                if not self._poll.poll(0):
                    break
                self._pgconn.consume_input()
            self._pgconn.flush()
        except psycopg.Error:
            self._failure = self._failure or self._end_of_stream()

    def _next_report_at(self) -> float:
        moved = self._confirmed != self._reported
        return self._sent_at + (min(CONFIRM_INTERVAL, self._interval) if moved else self._interval)

    def _report(self) -> None:
        """Send a status update; bytes that the socket does not accept now are sent at the next flush."""
        clock = time.time_ns() // 1000 - _POSTGRES_EPOCH
        now = time.monotonic()
        requests_reply = now - self._input_at >= self._silence / 3
        # written, flushed, applied: never the received position, which is not verified yet
        message = _STATUS.pack(b"r", self._confirmed, self._confirmed, self._confirmed, clock, requests_reply)
        try:
            self._pgconn.put_copy_data(message)
            self._pgconn.flush()
        except psycopg.Error:
            self._failure = self._failure or self._end_of_stream()
        self._reported, self._sent_at = self._confirmed, now
        if requests_reply and self._reply_requested_at is None:
            self._reply_requested_at = now

    def _end_of_stream(self) -> CdcError:
        """Return the error that ended the stream."""
        if self._pgconn.status == pq.ConnStatus.OK:
            while (answer := self._pgconn.get_result()) is not None:
                if answer.status == pq.ExecStatus.FATAL_ERROR:
                    return error_from_result(answer)
                if answer.status in {pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_BOTH}:
                    break
            return SourceUnreachable("the source ended the replication stream")
        text = self._pgconn.get_error_message().strip()
        return SourceUnreachable(f"the replication stream broke: {text.splitlines()[0] if text else 'no reason given'}")


def _limit_receive_buffer(descriptor: int) -> bool:
    """Limit the receive buffer of a TCP connection to RECEIVE_BUFFER if Postgres is on this machine.

    Returns True if it is limited. If the connection broke, does nothing, because its next use raises the error.
    """
    with socket.socket(fileno=os.dup(descriptor)) as connected, suppress(OSError):
        if (
            connected.family in {socket.AF_INET, socket.AF_INET6}
            and connected.getpeername()[0] == connected.getsockname()[0]
        ):
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
            return True
    return False


def _enlarge_receive_buffer(descriptor: int) -> None:
    """Set the receive buffer to LARGE_RECEIVE_BUFFER, or to the system's maximum."""
    with socket.socket(fileno=os.dup(descriptor)) as connected, suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, LARGE_RECEIVE_BUFFER)


def _intervals(conn: psycopg.Connection, options: StreamOptions) -> tuple[float, float]:
    """Return the interval of status updates and the silence limit, both in seconds.

    The interval is at most a third of `wal_sender_timeout`, and the silence limit is at least that timeout.
    """
    with map_errors():
        # pg_settings has milliseconds, SHOW a text with a unit
        timeout = conn.execute(b"SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'").fetchone()
    sender_timeout = int(timeout[0]) / 1000 if timeout else 0
    silence = max(options.silence, sender_timeout)
    interval = min(options.status_interval, silence / SILENCE_FRACTION)
    return min(interval, sender_timeout / TIMEOUT_FRACTION) if sender_timeout > 0 else interval, silence


def _confirmed_flush(conn: psycopg.Connection, slot: str) -> Lsn:
    """Return the slot's confirmed position; 0 if the slot does not exist: START_REPLICATION then raises the error."""
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = {quote_literal(slot)}"
    with map_errors():
        row = conn.execute(query.encode()).fetchone()
    return Lsn.parse(row[0]) if row and row[0] else Lsn(0)


def error_from_result(answer: pq.abc.PGresult) -> CdcError:
    """Return the CdcError for a failed libpq result."""
    sqlstate = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    message = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    return classify_message(sqlstate, message)


# Replication commands accept no parameters. Their grammar (`repl_scanner.l`) has no backslash escapes: a doubled quote
# is the only escape.


def quote_identifier(name: str) -> str:
    """Return the name as a quoted identifier: `a"b` → `"a""b"`.

    Raises InvalidDefinition for an empty name or a zero byte.
    """
    if not name or "\0" in name:
        raise InvalidDefinition(
            f"malformed name {name!r} of a slot or publication: expected at least one character, and no zero byte"
        )
    return '"' + name.replace('"', '""') + '"'


def quote_literal(text: str) -> str:
    """Return the text as a string literal: `it's` → `'it''s'`. Raises InvalidDefinition for a zero byte."""
    if "\0" in text:
        raise InvalidDefinition(f"malformed text: expected characters without a zero byte, got {text!r}")
    return "'" + text.replace("'", "''") + "'"


def publication_names_option(names: Sequence[str]) -> str:
    """Return the value of pgoutput's option `publication_names`: `a`, `b` → `'"a","b"'`."""
    return quote_literal(",".join(quote_identifier(name) for name in names))
