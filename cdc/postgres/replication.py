"""The replication stream: frames in batches, and the positions we tell the server.

psycopg has no replication cursor, so this is the loop over COPY BOTH. How it reads:

- The walsender sends every message by itself and wakes its reader for each. A reader that takes each one at
  once spends its time in system calls and thread switches; so once there is something to read it rests for REST,
  then makes libpq swallow all of it and takes it out in one compiled loop.
- While behind it rests for LONG_REST. From a server on this machine it then takes no more than WINDOW in between:
  what does not fit waits at the server's side of the socket, whose kernel joins it to large packets. A packet for
  every message costs the server twice as much, and the server is what bounds the rate.
- libpq and this class are used by one thread. Frames handed out are the caller's for ever.
- The server is told where we are by our own timer, whether frames come or not; a keepalive that
  asks for a reply is answered with what is confirmed, never with what was merely received.
- A peer that is gone without a word (behind a proxy or a firewall that forgot the connection) is found by our own
  timer too: after a time without a byte our updates ask for a reply, and a reply that never comes ends the stream.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
from dataclasses import dataclass
from enum import Enum, StrEnum
from types import TracebackType
from typing import Final, Self

import psycopg
from psycopg import pq

from cdc.errors import CdcError, PreflightFailed, SourceUnreachable
from cdc.lsn import Lsn
from cdc.pgoutput.frames import FrameBatch
from cdc.postgres import libpq
from cdc.postgres.connection import ANSWER_TIMEOUT, connect, disable_encoding_conversion, is_sql_ascii
from cdc.postgres.quoting import identifier, literal, publication_names
from cdc.postgres.sqlstate import classify_message, map_errors

REST: Final = 0.001
"""Seconds from waking up to the read, so that a transaction of a few rows comes whole instead of message by message."""
LONG_REST: Final = 0.010
"""The same while behind."""
BUSY: Final = 16 << 10
"""Bytes in a batch from which on we are behind: more than a hundred messages came within one rest."""
WINDOW: Final = 64 << 10
"""Bytes of the socket's receive buffer where the server is on this machine; the kernel doubles it. Measured with 64 to
256 KiB and rests of 1 to 20 ms, under BBR and CUBIC: 420,000 frames a second in every run instead of 180,000. Over a
network a small window would bound the rate by the distance, and packets are joined on their way anyway."""
READS: Final = 64
"""Socket reads before what came is taken out; the first of them make libpq's buffer grow."""
CONFIRM_INTERVAL: Final = 0.05
"""Seconds at least between two updates that only say that the confirmed position moved."""
TIMEOUT_FRACTION: Final = 3
"""Updates per `wal_sender_timeout`, so that two may be lost."""
SILENCE: Final = 60.0
"""Seconds without a byte after which the stream is given up: `wal_receiver_timeout` of Postgres' own subscribers. A
server that gives us longer (`wal_sender_timeout`, which its role can have for itself) gets as long from us: it may be
decoding what it does not send."""
SILENCE_FRACTION: Final = 6
"""Updates per such time: they ask for a reply from a third of it on, so that one has half of it to come."""
PARALLEL_SINCE: Final = 160_000
"""Protocol 4 and the option `origin` came with server 16."""

_POSTGRES_EPOCH: Final = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970."""
_STATUS: Final = struct.Struct(">cQQQQB")


@dataclass(frozen=True, slots=True)
class SystemIdentity:
    """What IDENTIFY_SYSTEM says."""

    system_id: str
    timeline: int
    wal_end: Lsn
    """Where the server has flushed its WAL to."""
    database: str


class LargeTransactions(Enum):
    """When a transaction above the server's `logical_decoding_work_mem` is sent."""

    #: While it runs, in blocks (protocol 2; from server 16 on protocol 4, whose aborts tell LSN and time).
    STREAMED = "streamed"
    #: At its commit, from the server's own disk (protocol 1).
    WHOLE = "whole"


class OriginFilter(StrEnum):
    """Whose transactions are sent."""

    #: All.
    ANY = "any"
    #: Only those that were made here, not replicated from elsewhere; server 16 or later.
    NONE = "none"


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What to stream."""

    slot: str
    publication: str
    start: Lsn
    """Where to start; the server starts at its own confirmed position if that is later."""
    status_interval: float = 10.0
    """Seconds between status updates; less if `wal_sender_timeout` is short."""
    silence: float = SILENCE
    """Seconds without a byte within which a peer that is gone is found; more if `wal_sender_timeout` is longer."""
    large: LargeTransactions = LargeTransactions.STREAMED
    origin: OriginFilter = OriginFilter.ANY

    def command(self, server: int) -> str:
        """START_REPLICATION for a server of this version (as `server_version_num`); raises PreflightFailed.

        `two_phase` is never asked for: rows of a prepared transaction would come once, before they are ours to keep.
        """
        given = {"publication_names": publication_names([self.publication]), "messages": "'true'"}
        if self.large is LargeTransactions.WHOLE:
            given["proto_version"] = "'1'"
        elif server < PARALLEL_SINCE:
            given |= {"proto_version": "'2'", "streaming": "'on'"}
        else:
            given |= {"proto_version": "'4'", "streaming": "'parallel'"}
        if self.origin is not OriginFilter.ANY:
            if server < PARALLEL_SINCE:
                raise PreflightFailed(
                    f"origin {self.origin.value!r} needs server version 16 or later, got {server // 10000}",
                    remedy="capture every origin, or upgrade the server",
                )
            given["origin"] = f"'{self.origin.value}'"
        options = ", ".join(f"{name} {value}" for name, value in given.items())
        return f"START_REPLICATION SLOT {identifier(self.slot)} LOGICAL {self.start} ({options})"


def identify_system(dsn: str) -> SystemIdentity:
    """Ask the cluster who it is."""
    with connect(dsn, replication=True, application_name="cdc identify", patience=ANSWER_TIMEOUT) as conn, map_errors():
        row = conn.execute(b"IDENTIFY_SYSTEM").fetchone()
    assert row is not None  # noqa: S101 - the protocol promises one row
    return SystemIdentity(str(row[0]), int(row[1]), Lsn.parse(row[2]), str(row[3]))


class ReplicationStream:
    """One walsender's stream; a context manager, for one thread only."""

    def __init__(self, conn: psycopg.Connection, floor: Lsn, interval: float, silence: float) -> None:
        self._conn, self._pgconn = conn, conn.pgconn
        self._drain = libpq.CopyDrain(self._pgconn)
        self._floor, self._interval, self._silence = floor, interval, silence
        # 0 tells the server nothing; anything below the slot's own position would move the slot back
        self._confirmed = self._reported = Lsn(0)
        self._sent_at = self._heard_at = time.monotonic()
        self._asked_at: float | None = None  # the first request for a reply since a byte came
        self._behind = False
        self._failure: CdcError | None = None
        self._poll = select.poll()
        self._poll.register(self._pgconn.socket, select.POLLIN)
        self.received_bytes = 0

    @classmethod
    def open(cls, dsn: str, options: StreamOptions) -> Self:
        """Connect and start streaming; raises SlotInUse, SlotMissing, SlotInvalidated and their kin."""
        libpq.load_functions()
        conn = connect(dsn, replication=True, application_name=f"cdc {options.slot}", patience=ANSWER_TIMEOUT)
        try:
            interval, silence = _intervals(conn, options)
            floor = _confirmed_flush(conn, options.slot)
            if is_sql_ascii(conn):
                with map_errors():
                    disable_encoding_conversion(conn)
            answer = conn.pgconn.exec_(options.command(conn.info.server_version).encode())
            if answer.status != pq.ExecStatus.COPY_BOTH:
                raise error_from_result(answer)  # noqa: TRY301 - the connection has to be closed
            conn.pgconn.nonblocking = 1
            _narrow(conn.pgconn.socket)
            stream = cls(conn, floor, interval, silence)
            stream._report()
        except BaseException:
            conn.close()
            raise
        return stream

    def receive(self, timeout: float) -> FrameBatch | None:
        """The frames that are there, after waiting up to timeout seconds for the first; None if none came.

        Bounded to about 4 MiB. Raises SourceUnreachable when the stream ended or the peer is silent for too long,
        UndecodableWal and others as the server says; frames that came before the end are given out first.
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
            self._gather(max(0.0, min(deadline, self._due()) - now))
            if timeout <= 0:
                return self._take()

    def confirm(self, flushed: Lsn) -> None:
        """Everything below flushed is durable with us; the server may forget it.

        Never goes back, neither behind what was said before nor behind where the slot stood at the start.
        """
        if flushed >= self._floor:
            self._confirmed = max(self._confirmed, flushed)
        self.tick()

    def tick(self) -> None:
        """Send a status update if one is due; for a caller that is not receiving just now."""
        if time.monotonic() >= self._due():
            self._report()

    def close(self) -> None:
        """Tell the last confirmed position and end the connection; the server frees the slot a moment later."""
        if self._conn.closed:
            return
        try:
            if self._failure is None and self._confirmed != self._reported:
                self._report()
        except SourceUnreachable:
            pass  # what was not told is sent again, and dropped by its position
        finally:
            self._conn.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _take(self) -> FrameBatch | None:
        drained = self._drain.take()
        frames = drained.frames
        if len(frames):
            self._behind = frames.nbytes >= BUSY
            self.received_bytes += frames.nbytes
        if drained.reply_requested and self._failure is None:
            self._report()
        if len(frames):
            return frames
        if drained.status < libpq.PENDING:
            raise self._failure or self._end_of_stream()
        if self._failure is not None:
            raise self._failure
        return None

    def _gather(self, seconds: float) -> None:
        """Wait for something to read, let some more come, and swallow it."""
        if self._poll.poll(seconds * 1000):
            self._heard_at, self._asked_at = time.monotonic(), None
            time.sleep(LONG_REST if self._behind else REST)
            self._swallow()

    def _check_silence(self, now: float) -> None:
        """Raise SourceUnreachable if no byte came for long, nor an answer to our asking for one."""
        silent = now - self._heard_at
        if self._asked_at is not None and silent >= self._silence and now - self._asked_at >= self._silence / 2:
            raise SourceUnreachable(f"the server has been silent for {silent:.0f} s and does not answer")

    def _swallow(self) -> None:
        """Make libpq read until nothing is readable; its failure waits until its frames were given out."""
        try:
            self._pgconn.consume_input()
            for _ in range(READS):
                if not self._poll.poll(0):
                    break
                self._pgconn.consume_input()
            self._pgconn.flush()
        except psycopg.Error:
            self._failure = self._failure or self._end_of_stream()

    def _due(self) -> float:
        moved = self._confirmed != self._reported
        return self._sent_at + (min(CONFIRM_INTERVAL, self._interval) if moved else self._interval)

    def _report(self) -> None:
        """Send the status update; what the socket does not take at once goes with the next flush."""
        clock = time.time_ns() // 1000 - _POSTGRES_EPOCH
        now = time.monotonic()
        ask = now - self._heard_at >= self._silence / 3
        # written, flushed, applied: what was merely received was read off the wire, and nobody has proved it
        message = _STATUS.pack(b"r", self._confirmed, self._confirmed, self._confirmed, clock, ask)
        try:
            self._pgconn.put_copy_data(message)
            self._pgconn.flush()
        except psycopg.Error:
            self._failure = self._failure or self._end_of_stream()
        self._reported, self._sent_at = self._confirmed, now
        if ask and self._asked_at is None:
            self._asked_at = now

    def _end_of_stream(self) -> CdcError:
        """Our error for why the stream is over."""
        if self._pgconn.status == pq.ConnStatus.OK:
            while (answer := self._pgconn.get_result()) is not None:
                if answer.status == pq.ExecStatus.FATAL_ERROR:
                    return error_from_result(answer)
                if answer.status in {pq.ExecStatus.COPY_IN, pq.ExecStatus.COPY_BOTH}:
                    break
            return SourceUnreachable("the server ended the stream")
        text = self._pgconn.get_error_message().strip()
        return SourceUnreachable(f"the stream broke: {text.splitlines()[0] if text else 'no reason given'}")


def _narrow(descriptor: int) -> None:
    """Bound what the socket takes in by WINDOW, if the other end is on this machine."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        if end.family in {socket.AF_INET, socket.AF_INET6} and end.getpeername()[0] == end.getsockname()[0]:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, WINDOW)


def _intervals(conn: psycopg.Connection, options: StreamOptions) -> tuple[float, float]:
    """Seconds between updates, at most a third of the server's patience, and of silence, at least its patience."""
    with map_errors():
        # in milliseconds, where SHOW gives a unit
        timeout = conn.execute(b"SELECT setting FROM pg_settings WHERE name = 'wal_sender_timeout'").fetchone()
    patience = int(timeout[0]) / 1000 if timeout else 0
    silence = max(options.silence, patience)
    interval = min(options.status_interval, silence / SILENCE_FRACTION)
    return min(interval, patience / TIMEOUT_FRACTION) if patience > 0 else interval, silence


def _confirmed_flush(conn: psycopg.Connection, slot: str) -> Lsn:
    """Where the slot stands; 0 if there is none, which the start will tell."""
    query = f"SELECT confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = {literal(slot)}"
    with map_errors():
        row = conn.execute(query.encode()).fetchone()
    return Lsn.parse(row[0]) if row and row[0] else Lsn(0)


def error_from_result(answer: pq.abc.PGresult) -> CdcError:
    """Our error for a failed result."""
    sqlstate = (answer.error_field(pq.DiagnosticField.SQLSTATE) or b"").decode()
    message = (answer.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode(errors="replace")
    return classify_message(sqlstate, message)
