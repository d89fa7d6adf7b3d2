"""The durable position of the log, and threads that wait for it; a waiting thread makes the next commit happen now."""

from __future__ import annotations

from collections.abc import Callable
from threading import Condition

from cdc.position import Position


class DurablePosition:
    """The durable position of one reader; thread-safe."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._position = Position(0)
        self._awaited: list[Position] = []
        self._hurry: Callable[[], None] = lambda: None

    @property
    def position(self) -> Position:
        """The last durable position."""
        return self._position

    def advance(self, position: Position) -> None:
        """The log holds all up to here."""
        with self._changed:
            self._position = position
            self._changed.notify_all()

    def on_wait(self, hurry: Callable[[], None]) -> None:
        """Call this in the thread of whoever begins to wait, before it does."""
        self._hurry = hurry

    def wait(self, position: Position, seconds: float) -> bool:
        """Whether the log holds all up to the position, within so many seconds."""
        with self._changed:
            if self._position >= position:
                return True
            self._awaited.append(position)
        try:
            self._hurry()
            with self._changed:
                return self._changed.wait_for(lambda: self._position >= position, seconds)
        finally:
            with self._changed:
                self._awaited.remove(position)

    def is_awaited(self, after: Position, upto: Position) -> bool:
        """Whether somebody waits for a position behind the one and not behind the other."""
        with self._changed:
            return any(after < position <= upto for position in self._awaited)
