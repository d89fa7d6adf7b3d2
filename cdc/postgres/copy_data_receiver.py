"""Receiver of CopyData messages: a compiled loop over libpq's PQgetCopyData, without a Python object per message.

The loop copies all buffered messages into one FrameBatch. `libpq` names the C functions that it calls. Where they
cannot be called, messages are received one by one through psycopg, at half the speed.
"""

from __future__ import annotations

import logging
import select
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic

from cdc.array_pool import ArrayPool
from cdc.cached_njit import FunctionNotCached, cached_njit, only_cached
from cdc.errors import LibpqUnusable
from cdc.pgoutput.message_parser import KEEPALIVE_SIZE, FrameBatch
from cdc.postgres import libpq
from cdc.postgres.libpq import LibpqFunctions

LIMIT: Final = 2 << 20
"""Number of bytes after which a batch ends: about 20,000 messages, and a few milliseconds of decoding."""
BLOCK: Final = 4 * LIMIT
"""Size of the memory blocks that consecutive batches share.

A batch begins only where twice the limit is left, so a block is only too small for a message larger than the limit.
"""
SPARE: Final = 2 * BLOCK
"""Bytes of memory blocks that are kept while no batch uses them."""
_FIRST_BUFFER: Final = 64 << 10

PENDING: Final = 0
"""Status: the buffer of libpq has no complete message; call again after input has arrived."""
ENDED: Final = -1
"""Status: Postgres ended the COPY; PQgetResult returns the result."""
FAILED: Final = -2
_BROKEN: Final = -3
"""Status: the connection broke; the next call of PQconsumeInput returns the error."""

PATIENCE_MS: Final = 200
"""Maximum milliseconds to wait for new input."""
REST_US: Final = 1_000
"""Microseconds to wait after new input before it is read.

Every read has a fixed cost. After this wait, one read gets several of the 8 kB pieces that Postgres sends.
"""
READS: Final = 16
"""Maximum number of socket reads before messages are extracted from libpq's buffer."""

_log = logging.getLogger(__name__)


class DrainResult(NamedTuple):
    """Result of one extraction of messages from libpq's buffer."""

    status: int
    """Positive if the limit was reached; otherwise PENDING, ENDED or FAILED."""
    reply_requested: bool
    """True if a keepalive among the extracted messages requests a reply."""


@intrinsic
def _call(typing_context: Any, address: Any, first: Any, second: Any, third: Any) -> Any:  # noqa: ARG001 - numba's form
    """Call the C function at the address with three integer-sized arguments; surplus arguments are ignored."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        function = ir.FunctionType(word, [word, word, word])
        return builder.call(builder.inttoptr(arguments[0], function.as_pointer()), arguments[1:])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


@cached_njit
def _drain(
    addresses: np.ndarray, limit: int, buffer: np.ndarray, offsets: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, int, int, bool]:
    """Append the messages in libpq's buffer to the `count` messages in `buffer`, until the buffer has `limit` bytes.

    `addresses` has PGconn, then LibpqFunctions. Return the buffer and the offsets (larger arrays if these were too
    small), the number of messages, the status, and whether a keepalive requests a reply.
    """
    connection, get_copy_data, free, copy = addresses[:4]
    message = np.zeros(1, np.int64)
    used = offsets[count]
    reply = False
    length: Any = 1
    while used < limit:
        # a C int: only the low half of the register counts
        length = np.int32(_call(get_copy_data, connection, message.ctypes.data, 1))
        if length <= 0:
            break
        if used + length > buffer.size:
            larger = np.empty(max(2 * buffer.size, used + length), np.uint8)
            larger[:used] = buffer[:used]
            buffer = larger
        _call(copy, buffer.ctypes.data + used, message[0], length)
        _call(free, message[0], 0, 0)
        is_keepalive = length == KEEPALIVE_SIZE and buffer[used] == 107  # noqa: PLR2004 - 'k'
        reply = reply or (is_keepalive and buffer[used + length - 1] == 1)
        used += length
        count += 1
        if count == offsets.size:
            more = np.empty(2 * offsets.size, np.int64)
            more[:count] = offsets
            offsets = more
        offsets[count] = used
    return buffer, offsets, count, length, reply


@cached_njit
def _gather(
    addresses: np.ndarray, pollfd: np.ndarray, limit: int, previous: tuple[np.ndarray, np.ndarray, int]
) -> tuple[np.ndarray, np.ndarray, int, int]:
    """Append messages as `_drain` does, until `limit` bytes or until PATIENCE_MS pass without new input.

    `addresses` is as in `_drain`. `previous` has the buffer, the offsets and the number of messages. Return their new
    values and the status.
    """
    buffer, offsets, count = previous
    connection = addresses[0]
    consume = addresses[4]
    poll = addresses[5]
    rest = addresses[6]
    while True:
        buffer, offsets, count, status, _ = _drain(addresses, limit, buffer, offsets, count)
        if status != PENDING or np.int32(_call(poll, pollfd.ctypes.data, 1, PATIENCE_MS)) <= 0:
            return buffer, offsets, count, status
        _call(rest, REST_US, 0, 0)
        for _ in range(READS):
            if np.int32(_call(consume, connection, 0, 0)) != 1:
                return buffer, offsets, count, _BROKEN
            if np.int32(_call(poll, pollfd.ctypes.data, 1, 0)) <= 0:
                break


class CopyDrain:
    """Collects the messages of one connection in COPY BOTH mode in a batch; it never blocks."""

    def __init__(self, pgconn: Any) -> None:
        self._pgconn = pgconn
        self._functions = load_functions()
        self._pool = ArrayPool(SPARE)
        self._block = np.empty(0, np.uint8)
        """Memory of the batch, and the rest of its memory block."""
        self._offsets, self._count = _empty_offsets(), 0

    @property
    def count(self) -> int:
        """Number of messages in the batch."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Number of bytes of the messages in the batch."""
        return int(self._offsets[self._count])

    def collect(self) -> DrainResult:
        """Add the messages that libpq has buffered to the batch, until the size of the batch reaches LIMIT."""
        if self._functions is None:
            drained = _drain_in_python(self._pgconn, LIMIT, self._block, self._offsets, self._count)
        else:
            if not self._count and self._block.size < 2 * LIMIT:
                self._block = self._pool.array(BLOCK)
            addresses = np.array([self._pgconn.pgconn_ptr, *self._functions], np.int64)
            drained = _drain(addresses, LIMIT, self._block, self._offsets, self._count)
        self._block, self._offsets, self._count, status, reply = drained
        return DrainResult(status, reply)

    def take(self) -> FrameBatch:
        """Return the batch, and begin an empty one."""
        nbytes, count = self.nbytes, self._count
        frames = FrameBatch(self._block[:nbytes], self._offsets[: count + 1])
        self._block, self._offsets, self._count = self._block[nbytes:], _empty_offsets(), 0
        return frames


class LineDrain:
    """Extracts the lines of a COPY from one connection in COPY OUT mode.

    The object reuses its memory, because page faults on new memory cost more than copying the lines. It compiles
    nothing, because the first copy on a machine would wait several seconds for the compiler.
    """

    def __init__(self, pgconn: Any) -> None:
        self._pgconn = pgconn
        self._functions = load_cached_functions()
        self._buffer, self._offsets = np.empty(_FIRST_BUFFER, np.uint8), _empty_offsets()
        self._count = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes of the lines that were read and that `take` has not returned yet."""
        return int(self._offsets[self._count])

    def gather(self, limit: int) -> int:
        """Read lines up to `limit` bytes, or until PATIENCE_MS pass without input; return a status.

        The status has the values of `DrainResult.status`. Raises OperationalError if the connection breaks.
        """
        if self._functions is None:
            return self._gather_in_python(limit)
        addresses = np.array([self._pgconn.pgconn_ptr, *self._functions], np.int64)
        previous = self._buffer, self._offsets, self._count
        self._buffer, self._offsets, self._count, status = _gather(
            addresses, _pollfd(self._pgconn.socket), limit, previous
        )
        if status == _BROKEN:
            self._pgconn.consume_input()
        return status

    def take(self) -> memoryview:
        """Return the lines that were read; the next call of `gather` overwrites their memory."""
        lines = self._buffer[: self.nbytes].data
        self._count = 0
        return lines

    def _gather_in_python(self, limit: int) -> int:
        poll = select.poll()
        poll.register(self._pgconn.socket, select.POLLIN)
        while True:
            self._buffer, self._offsets, self._count, status, _ = _drain_in_python(
                self._pgconn, limit, self._buffer, self._offsets, self._count
            )
            if status != PENDING or not poll.poll(PATIENCE_MS):
                return status
            self._pgconn.consume_input()


def _pollfd(descriptor: int) -> np.ndarray:
    """Return the bytes of a C `pollfd` that waits for input."""
    fields = [("fd", np.int32), ("events", np.int16), ("revents", np.int16)]
    return np.array([(descriptor, select.POLLIN, 0)], fields).view(np.uint8)


def _empty_offsets() -> np.ndarray:
    """Return the offsets of no messages, with room for some."""
    offsets = np.empty(256, np.int64)
    offsets[0] = 0
    return offsets


def _drain_in_python(
    pgconn: Any, limit: int, buffer: np.ndarray, offsets: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, int, int, bool]:
    """Append messages as `_drain` does, but without calling C functions by address."""
    added: list[bytes] = []
    used = first = int(offsets[count])
    length = 1
    while used < limit:
        length, view = pgconn.get_copy_data(1)
        if length <= 0:
            break
        added.append(bytes(view))
        used += length
    reply = any(len(frame) == KEEPALIVE_SIZE and frame[:1] == b"k" and frame[-1] == 1 for frame in added)
    frames = FrameBatch.of(added)
    buffer, offsets = np.append(buffer[:first], frames.buffer), np.append(offsets[:count], frames.offsets + first)
    return buffer, offsets, count + len(added), length, reply


@lru_cache(maxsize=1)
def load_functions() -> LibpqFunctions | None:
    """Return the C functions for the compiled loops, and compile these; None if the functions cannot be called."""
    try:
        functions = libpq.load()
    except LibpqUnusable as error:
        _log.warning(
            "data arrives one message at a time, at half the speed: %s %s; %s", error.code, error.message, error.fix
        )
        return None
    # compile now, which takes seconds on the first run of an installation, and not while a server waits
    nothing = np.empty(0, np.uint8), _empty_offsets(), 0
    _drain(np.zeros(4, np.int64), 0, *nothing)
    _gather(np.zeros(7, np.int64), _pollfd(0), 0, nothing)
    return functions


def load_cached_functions() -> LibpqFunctions | None:
    """Return the result of `load_functions`; None if the loops are not compiled yet."""
    with only_cached(), suppress(FunctionNotCached):
        return load_functions()
    return None
