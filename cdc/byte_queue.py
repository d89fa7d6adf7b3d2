"""Queue between two threads, bounded by bytes instead of items."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from threading import Condition
from typing import Generic, TypeVar

T = TypeVar("T")


class QueueClosed(Exception):
    """The queue was closed: no more items arrive, or the consumer has stopped."""


class ByteQueue(Generic[T]):
    """First-in, first-out queue with a limit in bytes; `put` blocks while the item does not fit.

    An empty queue accepts one item of any size.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._items: deque[tuple[T, int]] = deque()
        self._size = 0
        self._closed = self._woken = False
        self._changed = Condition()

    @property
    def size(self) -> int:
        """Number of queued bytes."""
        return self._size

    @property
    def has_items(self) -> bool:
        """True if at least one item is queued."""
        return bool(self._items)

    def put(self, item: T, size: int, *, meanwhile: Callable[[], None] | None = None) -> None:
        """Add an item of `size` bytes; wait while the queue is full.

        While it waits, `put` calls `meanwhile` about ten times a second. Raises QueueClosed if the queue is closed, for
        example after the consumer failed.
        """
        with self._changed:
            while not self._fits(size) and not self._closed:
                if self._changed.wait(0.1) or meanwhile is None:
                    continue
                meanwhile()
            if self._closed:
                raise QueueClosed
            self._items.append((item, size))
            self._size += size
            self._changed.notify_all()

    def wake(self) -> None:
        """Make the current or the next call of `get` return None if the queue is empty.

        Raises QueueClosed if the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise QueueClosed
            self._woken = True
            self._changed.notify_all()

    def get(self, timeout: float | None = None) -> T | None:
        """Return the next item; None if the queue is still empty after `timeout` seconds or a call of `wake`.

        Raises QueueClosed if the queue is closed and empty.
        """
        until = None if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._items:
                if self._closed:
                    raise QueueClosed
                left = None if until is None else until - time.monotonic()
                if self._woken or (left is not None and left <= 0):
                    self._woken = False
                    return None
                self._changed.wait(left)
            item, size = self._items.popleft()
            self._size -= size
            self._changed.notify_all()
            return item

    def close(self, *, discard: bool = False) -> None:
        """Refuse further items; queued items can still be read unless `discard` is True."""
        with self._changed:
            self._closed = True
            if discard:
                self._items.clear()
                self._size = 0
            self._changed.notify_all()

    def _fits(self, size: int) -> bool:
        return not self._items or self._size + size <= self._limit
