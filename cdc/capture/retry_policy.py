"""How long a reader that failed waits before it tries again, and when it stops trying. Knows no clock."""

from __future__ import annotations

from typing import Final

from cdc.back_off import BackOff
from cdc.errors import CdcError, Reaction, SlotInUse, SourceRejectsConnection, UndecodableWal

UNDECODABLE_ATTEMPTS: Final = 4
"""Attempts at a transaction that the server cannot decode. What decodes at the second or third attempt exists (a cache
of the server, a file that it makes again), but a value that is too large stays so: a person should read of it within a
minute. With POISON's pauses the attempts take 15 s and what the server needs to come to that transaction."""


FAST: Final = BackOff(0.2, 30.0)
"""The server restarts, the network comes back."""
SLOT_IN_USE: Final = BackOff(0.2, 1.0)
"""Another reader streams. Whether it has ended is asked steadily, however long it has run: rows wait from then on. One
question is a few short connections."""
REFUSED: Final = BackOff(5.0, 60.0)
"""Somebody may be changing a password or a limit; asking often would lock accounts."""
UNDECODABLE: Final = BackOff(2.0, 8.0)
"""Decoding the same WAL again costs the source."""


def retry_pause(error: BaseException, failures: int) -> float | None:
    """Seconds to wait before the next attempt; None if there is to be none.

    `failures` counts the attempts in a row, this one included, after which the log did not get on; of UndecodableWal
    only those that failed with it.
    """
    if isinstance(error, UndecodableWal):
        return UNDECODABLE.seconds(failures) if failures < UNDECODABLE_ATTEMPTS else None
    if not isinstance(error, CdcError) or error.reaction is not Reaction.RETRY:
        return None
    if isinstance(error, SlotInUse):
        return SLOT_IN_USE.seconds(failures)
    return (REFUSED if isinstance(error, SourceRejectsConnection) else FAST).seconds(failures)
