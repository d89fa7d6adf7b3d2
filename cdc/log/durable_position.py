"""The durable position of the log, and the threads that wait for it.

A thread that begins to wait makes the next commit happen now.
"""

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
        self._commit_soon: Callable[[], None] = lambda: None

    @property
    def position(self) -> Position:
        """The last durable position."""
        return self._position

    def advance(self, position: Position) -> None:
        """Report that the log contains everything up to position."""
        with self._changed:
            self._position = position
            self._changed.notify_all()

    def on_wait(self, commit_soon: Callable[[], None]) -> None:
        """Set a function that each waiting thread calls before it waits."""
        self._commit_soon = commit_soon

    def wait(self, position: Position, seconds: float) -> bool:
        """Wait until the log contains everything up to position; False if that takes longer than so many seconds."""
        with self._changed:
            if self._position >= position:
                return True
            self._awaited.append(position)
        try:
            self._commit_soon()
            with self._changed:
                return self._changed.wait_for(lambda: self._position >= position, seconds)
        finally:
            with self._changed:
                self._awaited.remove(position)

    def is_awaited(self, after: Position, upto: Position) -> bool:
        """Whether a thread waits for a position in (after, upto]."""
        with self._changed:
            return any(after < position <= upto for position in self._awaited)
