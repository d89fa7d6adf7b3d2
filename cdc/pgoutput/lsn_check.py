"""LsnCheck: compares every LSN that orders transactions with other fields of the stream that repeat it.

The LSN of a commit becomes a position of the log, and a wrong position cannot be removed. If the LSN is too high, the
reader drops later transactions below this LSN as already known. Once the LSN is confirmed, the server removes their
WAL. If the LSN is too low, the server sends the transaction again, and the log contains the transaction twice.

The protocol repeats most of these LSNs. The rules apply to plain transactions in commit order; the spool
(`cdc/capture/spool.py`) has already converted streamed transactions to plain ones:

1. Begin and Commit name the same commit LSN and the same commit time.
2. The commit LSN is below the end LSN, and the end LSN is the WAL position in the header of the Commit's frame.
3. The commit LSN is not below the WAL position in the header of any change of the transaction.
4. A message outside of transactions contains the same LSN as the header of its frame.
5. The LSN of a commit or of such a message is not below the end of the previous commit or message. The first LSN is
   not below the position that the slot had confirmed: the server skips older transactions.

No other field repeats the WAL end of a keepalive, so it never becomes a position (`cdc/capture/decode_stage.py`).
`cdc/postgres/commit_position_bound.py` detects LSNs that agree but are all too high.

The stream contains the commit LSN of a Stream Commit only once. If this LSN is slightly too low but not below the last
change, no rule detects it. The log then has the transaction at a wrong position in the right order. When the server
sends the transaction again, the reader recognises its xid and drops the transaction.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from cdc.errors import ContradictoryLsn
from cdc.lsn import Lsn
from cdc.pgoutput.kernel import BEGIN, BEGIN_SIZE, COMMIT, COMMIT_SIZE, HEADER, WAL, kernel
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.stream_blocks import readonly_arrays
from cdc.pgoutput.word_ops import read_8_bytes

_MESSAGE: Final = ord("M")
_LSN_SIZE: Final = 8
_SHOWN: Final = HEADER + 2 + _LSN_SIZE
"""Number of bytes of a frame that an error shows: up to the LSN in the message, after which a value may begin."""
# indices of the state
_FLOOR, _BEGUN, _BEGUN_AT, _CHANGED, _RULE, _STATE_SIZE = range(6)
_BROKEN: Final = (
    "",
    "LSN or time of Commit and Begin differ",
    "the end LSN of Commit is not the WAL position of its frame",
    "the commit LSN is below a change of the transaction",
    "the LSN of the message is not the WAL position of its frame",
    "the LSN is below the end of the preceding transaction or message",
)
"""Error message by the number of the violated rule."""


class LsnCheck:
    """Check of the LSNs in all frames of one replication session, from the first frame on; not thread-safe."""

    def __init__(self, floor: Lsn) -> None:
        """floor: the LSN that the slot had confirmed at the start of the session."""
        self._state = np.zeros(_STATE_SIZE, np.int64)
        self._state[_FLOOR] = min(floor, np.iinfo(np.int64).max)

    def checked(self, frames: FrameBatch) -> FrameBatch:
        """Return the frames unchanged; raises ContradictoryLsn if a frame violates a rule of this module.

        Messages of a wrong size are not checked, because the decoder rejects them.
        """
        index = int(_first_broken(*readonly_arrays(frames), self._state))
        if index < len(frames):
            frame = frames[index]
            broken, floor = _BROKEN[int(self._state[_RULE])], Lsn(int(self._state[_FLOOR]))
            raise ContradictoryLsn(
                f"the stream contradicts itself after {floor}: {broken}; frame starts with '{frame[:_SHOWN].hex()}'"
            )
        return frames


@kernel
def _commit_breaks(buffer: np.ndarray, at: int, state: np.ndarray) -> int:
    """Return the number of the rule that a Commit message violates, 0 for none; `at` is the offset of its body."""
    lsn, end = read_8_bytes(buffer, at + 1), read_8_bytes(buffer, at + 9)
    if lsn != state[_BEGUN] or read_8_bytes(buffer, at + 17) != state[_BEGUN_AT]:
        return 1
    if lsn >= end or end != read_8_bytes(buffer, at - HEADER):
        return 2
    if lsn < state[_CHANGED]:
        return 3
    if lsn < state[_FLOOR]:
        return 5
    state[_FLOOR], state[_BEGUN] = end, 0
    return 0


@kernel
def _message_breaks(buffer: np.ndarray, at: int, state: np.ndarray) -> int:
    """Return the number of the rule that a logical message outside transactions violates; 0 if it violates none."""
    lsn = read_8_bytes(buffer, at + 1)
    if lsn != read_8_bytes(buffer, at - HEADER):
        return 4
    if lsn < state[_FLOOR]:
        return 5
    state[_FLOOR] = lsn
    return 0


@kernel
def _first_broken(buffer: np.ndarray, offsets: np.ndarray, state: np.ndarray) -> int:
    """Return the index of the first frame that violates a rule; the number of frames if none does.

    The function stores the number of the violated rule in `state`.
    """
    for place in range(len(offsets) - 1):
        first = offsets[place]
        at = first + HEADER + 1
        size = offsets[place + 1] - at
        if size < 0 or buffer[first] != WAL:
            continue
        kind, broken = buffer[first + HEADER], 0
        if kind == BEGIN and size == BEGIN_SIZE:
            state[_BEGUN], state[_BEGUN_AT], state[_CHANGED] = read_8_bytes(buffer, at), read_8_bytes(buffer, at + 8), 0
        elif kind == COMMIT and size == COMMIT_SIZE:
            broken = _commit_breaks(buffer, at, state)
        elif kind == _MESSAGE and size > _LSN_SIZE and buffer[at] & 1 == 0:
            broken = _message_breaks(buffer, at, state)
        elif state[_BEGUN] != 0:
            state[_CHANGED] = max(state[_CHANGED], read_8_bytes(buffer, first + 1))
        if broken != 0:
            state[_RULE] = broken
            return place
    return len(offsets) - 1
