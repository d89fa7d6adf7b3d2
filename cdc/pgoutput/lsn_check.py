"""LsnCheck: every LSN that orders transactions, compared with the other fields of the stream that repeat it.

The LSN of a commit becomes a position of the log, and a wrong position cannot be taken back: if it is too high, all
transactions up to it are dropped as known, and confirming it lets the server forget them; if it is too low, the
transaction is sent again and is in the log twice. The protocol says most of it more than once. The rules, for the
plain transactions that the spool gives out, in the order of their commits:

1. Begin and Commit name the same commit LSN and the same commit time.
2. The commit LSN is below the end LSN, and the end LSN is the WAL position in the header of the Commit's frame.
3. The commit LSN is not below the WAL position in the header of any change of the transaction.
4. A message outside of transactions names the LSN that the header of its frame names.
5. The LSN of a commit or of such a message is not below the end of the one before it. The first one is not below
   the position that the slot had confirmed: the server skips what is older.

The keepalive's WAL end has no second witness, therefore it never becomes a position
(`cdc/capture/decode_stage.py`). Fields that agree and are all false are found by asking the server:
`cdc/postgres/wal_bound.py`. The commit LSN of a Stream Commit is in the stream once. If it is a little too low, and
still not below the last change, no rule finds it: the log then has the transaction at a wrong place in the right order,
and drops it by its xid when it is sent again.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from cdc.errors import ContradictoryLsn
from cdc.lsn import Lsn
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.kernel import BEGIN, BEGIN_SIZE, COMMIT, COMMIT_SIZE, HEADER, WAL, kernel
from cdc.pgoutput.streamed import readonly_arrays

_MESSAGE: Final = ord("M")
_LSN_SIZE: Final = 8
_SHOWN: Final = HEADER + 2 + _LSN_SIZE
"""Bytes of a frame that an error shows: up to the message's own LSN, behind which a value may begin."""
# places in the state
_FLOOR, _BEGUN, _BEGUN_AT, _CHANGED, _RULE, _STATE_SIZE = range(6)
_BROKEN: Final = (
    "",
    "the commit is not that of its begin",
    "the commit's end is not where its frame says",
    "the commit lies before a change of its transaction",
    "the message is not where its frame says",
    "it lies before the end of what came before it",
)
"""By the number of the rule."""


class LsnCheck:
    """Of one replication session, from its first frame on; not thread-safe."""

    def __init__(self, floor: Lsn) -> None:
        """floor: what the slot had confirmed when the session began."""
        self._state = np.zeros(_STATE_SIZE, np.int64)
        self._state[_FLOOR] = min(floor, np.iinfo(np.int64).max)

    def checked(self, frames: FrameBatch) -> FrameBatch:
        """The same frames; raises ContradictoryLsn. Frames of another size than theirs are left to the decoder."""
        place = int(_first_broken(*readonly_arrays(frames), self._state))
        if place < len(frames):
            frame = frames[place]
            broken, floor = _BROKEN[int(self._state[_RULE])], Lsn(int(self._state[_FLOOR]))
            raise ContradictoryLsn(
                f"the stream contradicts itself after {floor}: {broken}; frame starts with '{frame[:_SHOWN].hex()}'"
            )
        return frames


@kernel
def _read(buffer: np.ndarray, at: int) -> Any:
    """Eight bytes, big-endian; what is 2**63 or more becomes negative."""
    value = np.int64(0)
    for i in range(at, at + 8):
        value = (value << 8) | np.int64(buffer[i])
    return value


@kernel
def _commit_breaks(buffer: np.ndarray, at: int, state: np.ndarray) -> int:
    """Number of the rule that the Commit breaks whose body begins there; 0 if it breaks none."""
    lsn, end = _read(buffer, at + 1), _read(buffer, at + 9)
    if lsn != state[_BEGUN] or _read(buffer, at + 17) != state[_BEGUN_AT]:
        return 1
    if lsn >= end or end != _read(buffer, at - HEADER):
        return 2
    if lsn < state[_CHANGED]:
        return 3
    if lsn < state[_FLOOR]:
        return 5
    state[_FLOOR], state[_BEGUN] = end, 0
    return 0


@kernel
def _message_breaks(buffer: np.ndarray, at: int, state: np.ndarray) -> int:
    """The same of a message outside of transactions."""
    lsn = _read(buffer, at + 1)
    if lsn != _read(buffer, at - HEADER):
        return 4
    if lsn < state[_FLOOR]:
        return 5
    state[_FLOOR] = lsn
    return 0


@kernel
def _first_broken(buffer: np.ndarray, offsets: np.ndarray, state: np.ndarray) -> int:
    """Place of the first frame that breaks a rule, whose number is then in the state; without one their number."""
    for place in range(len(offsets) - 1):
        first = offsets[place]
        at = first + HEADER + 1
        size = offsets[place + 1] - at
        if size < 0 or buffer[first] != WAL:
            continue
        kind, broken = buffer[first + HEADER], 0
        if kind == BEGIN and size == BEGIN_SIZE:
            state[_BEGUN], state[_BEGUN_AT], state[_CHANGED] = _read(buffer, at), _read(buffer, at + 8), 0
        elif kind == COMMIT and size == COMMIT_SIZE:
            broken = _commit_breaks(buffer, at, state)
        elif kind == _MESSAGE and size > _LSN_SIZE and buffer[at] & 1 == 0:
            broken = _message_breaks(buffer, at, state)
        elif state[_BEGUN] != 0:
            state[_CHANGED] = max(state[_CHANGED], _read(buffer, first + 1))
        if broken != 0:
            state[_RULE] = broken
            return place
    return len(offsets) - 1
