"""How long the replication stream waits between the arrival of input and its read, and for how long it collects reads.

After a wait one read gets more input. While the reader is far behind, several reads are collected in one batch of
frames, because each batch has a fixed cost in the stages after it.
"""

from __future__ import annotations

from typing import Final

from cdc.pgoutput.message_parser import KEEPALIVE_SIZE

READ_DELAY: Final = 0.001
"""Seconds between the first input and the read, so that one read gets all messages of a small transaction."""
STEADY_READ_DELAY: Final = 0.020
"""Default seconds between input and read while input arrives steadily and the reader is not behind.

One read and one decoding then serve all transactions of this time.
"""
STEADY_INPUT: Final = 0.050
"""Input is steady if it arrives within this many seconds after changes were read; otherwise READ_DELAY applies."""
BEHIND_READ_DELAY: Final = 0.010
"""Maximum seconds between input and read while the reader is behind; one read then gets more than after READ_DELAY."""
READ_BYTES: Final = 384 << 10
"""Bytes that a read should get while the reader is behind: more would fill the buffers, and Postgres would wait."""
BEHIND_BYTES: Final = 16 << 10
"""The reader counts as behind if it got at least this many bytes for each STEADY_READ_DELAY of its last wait.

These are more than a hundred messages. A shorter wait counts as STEADY_READ_DELAY.
"""
BEHIND_AT_MOST: Final = 4
"""After its last large read the reader counts as behind for at most this many times BEHIND_READ_DELAY."""
LARGE_MESSAGE: Final = 8 << 10
"""Average bytes of a message from which READ_DELAY applies, because few messages fill the buffers."""
BATCH_BYTES: Final = 768 << 10
"""Bytes of frames with which a batch is complete.

Decoding takes 1 ms for each batch and 0.25 ms for a thousand frames: a read of READ_BYTES has about 4,000 frames.
"""
BATCH_SECONDS: Final = 0.03
"""Maximum seconds for which a batch is collected; at a rate at which BATCH_BYTES need longer, nothing is collected."""
BATCH_PAUSE: Final = 0.004
"""Seconds without input after which a batch is complete before it has BATCH_BYTES."""


class ReadDelay:
    """The delay before each read, and the time for a batch of reads, from the sizes and times of the reads before."""

    def __init__(self) -> None:
        self._level, self._noted_at = 0.0, 0.0
        """Bytes in a bucket that loses BEHIND_BYTES in each BEHIND_READ_DELAY, at the time of the last read."""
        self._changes_at = float("-inf")
        """Time of the last read that had changes."""
        self._waited = 0.0
        self._rate = 1.0
        """Bytes per second of the last large read."""
        self._mean_rate = 1.0
        """Mean of `_rate`, in which each large read counts half as much as the next one."""
        self.has_large_messages = False
        """Whether the messages of the last large read were large."""

    def note(self, nbytes: int, messages: int, now: float) -> None:
        """Record the messages of one read."""
        seconds = now - self._noted_at
        lost = BEHIND_BYTES * seconds / BEHIND_READ_DELAY
        self._level = min(max(0.0, self._level - lost) + nbytes, BEHIND_AT_MOST * BEHIND_BYTES)
        if nbytes >= BEHIND_BYTES:  # a commit between two large transactions says nothing about the messages in them
            self._rate = nbytes / max(seconds, READ_DELAY)
            self._mean_rate = (self._rate + self._mean_rate) / 2
            self.has_large_messages = nbytes >= LARGE_MESSAGE * messages
        if nbytes > KEEPALIVE_SIZE * messages:  # not keepalives alone
            self._changes_at = now
        self._noted_at = now

    @property
    def batch_seconds(self) -> float:
        """Seconds for which the reads from now on are collected in one batch; 0 if each read is a batch."""
        is_fast = self._level >= BEHIND_BYTES and self._mean_rate * BATCH_SECONDS >= BATCH_BYTES
        return BATCH_SECONDS if is_fast and not self.has_large_messages else 0.0

    def seconds(self, gather: float, now: float) -> float:
        """Return the delay before the input that arrived now is read, and remember it.

        gather: the delay while input arrives steadily and the reader is not behind.
        """
        if self._level >= BEHIND_BYTES * max(1.0, self._waited / STEADY_READ_DELAY):
            fits = READ_DELAY if self.has_large_messages else READ_BYTES / self._rate
            self._waited = min(max(fits, READ_DELAY), BEHIND_READ_DELAY)
        else:
            self._waited = gather if now - self._changes_at < STEADY_INPUT else READ_DELAY
        return self._waited
