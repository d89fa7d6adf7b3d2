"""Awaited position: a position that a published cut or one of its tables must have reached before it is read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from cdc.back_off import BackOff
from cdc.position import Position

POLL: Final = BackOff(0.02, 0.05)
"""Pauses between two checks whether a sink has reached a position."""


@dataclass(frozen=True, slots=True)
class AwaitedPosition:
    """A position that a sink must reach; an LSN without an epoch is of the sink's present epoch."""

    position: Position
    has_epoch: bool

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse `16/B374D848` or `2:16/B374D848`; raises ConfigError for any other text."""
        return cls(Position.parse(text), ":" in text)

    def after(self, present: int) -> Position:
        """Return the position; an LSN without an epoch becomes a position of the epoch of `present`."""
        return self.position if self.has_epoch else Position.of(self.position.lsn, Position(present).epoch)

    def is_reached(self, present: int) -> bool:
        """Return True if a sink at `present` has every change up to the position."""
        return present >= self.after(present)
