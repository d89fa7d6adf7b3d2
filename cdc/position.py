"""Position of a transaction in the log, ordered across source epochs.

A position is ``epoch << 52 | commit LSN``. The commit LSN is the LSN of the transaction's commit record. LSNs can begin
again at a low number, for example after an upgrade or after a backup was restored. The epoch then increases by one, so
positions never decrease. A change is identified by its transaction's position and by its ordinal in the transaction.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self

from cdc.errors import MalformedPosition
from cdc.lsn import Lsn

LSN_BITS: Final = 52
"""Number of bits for the LSN: 4 PiB of WAL inside one epoch, which is 40 years at 3 MB/s."""
EPOCH_BITS: Final = 11
"""Number of bits for the epoch. Together with LSN_BITS this gives 63 bits, so a position fits a positive `bigint`."""

_LSN_MASK: Final = (1 << LSN_BITS) - 1


class Position(int):
    """The position of one transaction in the log: an ordered int, unique per transaction."""

    __slots__ = ()

    def __new__(cls, value: int = 0) -> Self:
        if not 0 <= value < 1 << (LSN_BITS + EPOCH_BITS):
            raise MalformedPosition(f"position out of range: expected 0 to 2**63 - 1, got {int(value)!r}")
        return super().__new__(cls, value)

    @classmethod
    def of(cls, lsn: int, epoch: int = 0) -> Self:
        """Return the position of the transaction whose commit record is at `lsn`, in the given epoch."""
        if not 0 <= lsn <= _LSN_MASK:
            raise MalformedPosition(f"lsn does not fit a position: expected below 2**52, got {int(lsn)!r}")
        if not 0 <= epoch < 1 << EPOCH_BITS:
            raise MalformedPosition(f"epoch out of range: expected 0 to {(1 << EPOCH_BITS) - 1}, got {epoch!r}")
        return cls(epoch << LSN_BITS | lsn)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse a text such as `16/B374D848` or, with an epoch above 0, `2:16/B374D848`.

        Raises MalformedPosition or MalformedLsn for any other text.
        """
        epoch, colon, lsn = text.rpartition(":")
        if colon and not (epoch.isascii() and epoch.isdigit()):
            raise MalformedPosition(f"malformed position: expected 'epoch:lsn' as in '2:16/B374D848', got {text!r}")
        return cls.of(Lsn.parse(lsn), int(epoch or 0))

    @property
    def epoch(self) -> int:
        """Number of the epoch, from 0."""
        return int(self) >> LSN_BITS

    @property
    def lsn(self) -> Lsn:
        """LSN of the transaction's commit record."""
        return Lsn(int(self) & _LSN_MASK)

    def __str__(self) -> str:
        # as Lsn prints itself, without an object of it: a delivery prints the position of each transaction
        epoch, lsn = int(self) >> LSN_BITS, int(self) & _LSN_MASK
        return f"{epoch}:{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}" if epoch else f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"

    def __repr__(self) -> str:
        return f"Position({str(self)!r})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)


class ChangePosition(NamedTuple):
    """Position and ordinal, which identify one change and order all changes of the log."""

    position: Position
    ordinal: int
    """Number of the change inside its transaction, from 0; `s` rows count as changes."""

    def __str__(self) -> str:
        return f"{self.position}#{self.ordinal}"
