"""Retry policy of the reader: the pause before the next attempt, by class of error, and when it gives up."""

from __future__ import annotations

from typing import Final

from cdc.back_off import BackOff
from cdc.errors import CdcError, Reaction, SlotInUse, SourceRejectsConnection, UndecodableWal

UNDECODABLE_ATTEMPTS: Final = 4
"""Attempts at a transaction that the server cannot decode. Some causes end at the second or third attempt (a stale
cache, a file that the server recreates); a value that is too large does not, and an operator should know within a
minute. With the pauses of UNDECODABLE the attempts take 15 s plus the server's time to reach the transaction."""


FAST: Final = BackOff(0.2, 30.0)
"""Default: a server that restarts, a network that recovers."""
SLOT_IN_USE: Final = BackOff(0.2, 1.0)
"""Another reader streams from the slot. Pauses stay short, because rows wait once that reader ends; an attempt costs a
few short connections."""
REFUSED: Final = BackOff(5.0, 60.0)
"""The server refuses the login or is out of connections; frequent attempts could lock the account."""
UNDECODABLE: Final = BackOff(2.0, 8.0)
"""Every attempt makes the source decode the same WAL again."""


def retry_pause(error: BaseException, failures: int) -> float | None:
    """Seconds to wait before the next attempt; None if the reader gives up.

    failures: consecutive failed attempts, this one included, without progress of the log; for UndecodableWal only the
    attempts that failed with it.
    """
    if isinstance(error, UndecodableWal):
        return UNDECODABLE.seconds(failures) if failures < UNDECODABLE_ATTEMPTS else None
    if not isinstance(error, CdcError) or error.reaction is not Reaction.RETRY:
        return None
    if isinstance(error, SlotInUse):
        return SLOT_IN_USE.seconds(failures)
    return (REFUSED if isinstance(error, SourceRejectsConnection) else FAST).seconds(failures)
