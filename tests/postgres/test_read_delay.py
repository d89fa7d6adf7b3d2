"""The delay before a read: long while little arrives steadily, short while the reader is behind; batches of reads."""

from __future__ import annotations

import pytest

from cdc.pgoutput.message_parser import KEEPALIVE_SIZE
from cdc.postgres.read_delay import (
    BATCH_BYTES,
    BATCH_SECONDS,
    BEHIND_AT_MOST,
    BEHIND_BYTES,
    BEHIND_READ_DELAY,
    READ_BYTES,
    READ_DELAY,
    STEADY_READ_DELAY,
    ReadDelay,
)

GATHER = 0.025
SOON, LATE = 0.001, 1.0
"""Seconds between a read and the next input."""
LARGE = 1 << 20


class Reads(ReadDelay):
    """Delays after some reads, each with its bytes, messages and time."""

    def __init__(self, *reads: tuple[int, int, float]) -> None:
        super().__init__()
        for nbytes, messages, at in reads:
            self.note(nbytes, messages, at)

    def note(self, nbytes: int, messages: int, now: float) -> None:
        super().note(nbytes, messages, now)
        self._last = now

    def until_next(self, since_read: float, gather: float = GATHER) -> float:
        return self.seconds(gather, self._last + since_read)


def test_rare_input_is_read_at_once_and_steady_input_is_gathered() -> None:
    delay = Reads((500, 5, 10.0))

    assert delay.until_next(LATE) == READ_DELAY
    assert delay.until_next(SOON) == GATHER


def test_after_keepalives_alone_changes_are_read_at_once() -> None:
    keepalive = (KEEPALIVE_SIZE, 1, 10.0)

    assert Reads(keepalive).until_next(SOON) == READ_DELAY
    assert Reads((500, 5, 9.99), keepalive).until_next(SOON) == GATHER


def test_as_many_bytes_are_behind_only_in_a_short_time() -> None:
    half = BEHIND_BYTES // 2

    assert Reads((half, 100, 10.0), (half + 100, 100, 10.0)).until_next(SOON) == BEHIND_READ_DELAY
    assert Reads((half, 100, 10.0), (half, 100, 10.0 + STEADY_READ_DELAY)).until_next(SOON) == GATHER


def test_a_longer_wait_may_gather_more() -> None:
    delay = Reads((500, 5, 10.0))
    delay.until_next(SOON, 2 * STEADY_READ_DELAY)
    delay.note(BEHIND_BYTES + 100, 100, 10.0 + 2 * STEADY_READ_DELAY)

    assert delay.until_next(SOON) == GATHER


def test_a_read_waits_until_the_buffers_are_about_full() -> None:
    fast = Reads((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.004))
    faster = Reads((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.002))

    assert fast.until_next(SOON) == pytest.approx(READ_BYTES / LARGE * 0.004)
    assert faster.until_next(SOON) == READ_DELAY


def test_many_small_batches_in_a_short_time_are_behind() -> None:
    delay = Reads(*((BEHIND_BYTES // 2, 100, 10.0 + i / 1000) for i in range(10)))

    assert delay.until_next(SOON) == BEHIND_READ_DELAY


def test_large_messages_are_read_sooner_and_a_commit_between_them_changes_nothing() -> None:
    delay = Reads((LARGE, 1, 10.0), (150, 3, 10.001))

    assert delay.until_next(SOON) == READ_DELAY


def test_the_reader_is_behind_for_a_moment_after_the_last_input() -> None:
    end = 10.0 + BEHIND_AT_MOST * BEHIND_READ_DELAY

    assert Reads((LARGE, 9_000, 10.0), (1, 1, end - 2 * BEHIND_READ_DELAY)).until_next(SOON) == BEHIND_READ_DELAY
    assert Reads((LARGE, 9_000, 10.0), (1, 1, end)).until_next(SOON) == GATHER


def far_behind(nbytes: int, messages: int) -> Reads:
    """Return the delays after 20 reads of this size, one in each BEHIND_READ_DELAY."""
    return Reads(*((nbytes, messages, 10.0 + i * BEHIND_READ_DELAY) for i in range(20)))


def test_reads_are_collected_only_at_a_rate_that_fills_a_batch_in_time() -> None:
    enough = int(BATCH_BYTES * BEHIND_READ_DELAY / BATCH_SECONDS) + 1000

    assert far_behind(enough, 4_000).batch_seconds == BATCH_SECONDS
    assert far_behind(enough // 2, 4_000).batch_seconds == 0
    assert Reads((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.010), (500, 5, 10.1)).batch_seconds == 0


def test_large_messages_are_not_collected() -> None:
    assert far_behind(LARGE, 2).batch_seconds == 0
