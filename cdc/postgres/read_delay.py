"""How long the replication stream waits between the arrival of input and its read: one read then gets more of it."""

from __future__ import annotations

from typing import Final

READ_DELAY: Final = 0.001
"""Seconds between the first input and the read, so that one read gets all messages of a small transaction."""
STEADY_READ_DELAY: Final = 0.020
"""Default seconds between input and read while input arrives steadily and the reader is not behind.

One read and one decoding then serve all transactions of this time.
"""
STEADY_INPUT: Final = 0.050
"""Input is steady if it arrives within this many seconds after the last read; otherwise READ_DELAY applies."""
BEHIND_READ_DELAY: Final = 0.010
"""Maximum seconds between input and read while the reader is behind; one read then gets more than after READ_DELAY."""
READ_BYTES: Final = 384 << 10
"""Bytes that a read should get while the reader is behind: more would fill the buffers, and Postgres would wait."""
BEHIND_BYTES: Final = 16 << 10
"""The reader counts as behind if it got at least this many bytes for each STEADY_READ_DELAY of its last wait.

These are more than a hundred messages. A shorter wait counts as STEADY_READ_DELAY.
"""
BEHIND_AT_MOST: Final = 4
"""After its last large batch the reader counts as behind for at most this many times BEHIND_READ_DELAY."""
LARGE_MESSAGE: Final = 8 << 10
"""Average bytes of a message from which READ_DELAY applies, because few messages fill the buffers."""


class ReadDelay:
    """The delay before each read, from the sizes and times of the batches before it."""

    def __init__(self) -> None:
        self._level, self._noted_at = 0.0, 0.0
        """Bytes in a bucket that loses BEHIND_BYTES in each BEHIND_READ_DELAY, at the time of the last batch."""
        self._waited = 0.0
        self._rate = 1.0
        """Bytes per second of the last large batch."""
        self.has_large_messages = False
        """Whether the messages of the last large batch were large."""

    def note(self, nbytes: int, messages: int, now: float) -> None:
        """Record a batch of messages."""
        seconds = now - self._noted_at
        lost = BEHIND_BYTES * seconds / BEHIND_READ_DELAY
        self._level = min(max(0.0, self._level - lost) + nbytes, BEHIND_AT_MOST * BEHIND_BYTES)
        if nbytes >= BEHIND_BYTES:  # a commit between two large transactions says nothing about the messages in them
            self._rate = nbytes / max(seconds, READ_DELAY)
            self.has_large_messages = nbytes >= LARGE_MESSAGE * messages
        self._noted_at = now

    def seconds(self, gather: float, since_read: float) -> float:
        """Return the delay of the next read, and remember it.

        gather: the delay while input arrives steadily and the reader is not behind. since_read: seconds between the
        last read and the input.
        """
        if self._level >= BEHIND_BYTES * max(1.0, self._waited / STEADY_READ_DELAY):
            fits = READ_DELAY if self.has_large_messages else READ_BYTES / self._rate
            self._waited = min(max(fits, READ_DELAY), BEHIND_READ_DELAY)
        else:
            self._waited = gather if since_read < STEADY_INPUT else READ_DELAY
        return self._waited
