"""The delay before a read: long while little arrives steadily, short while the reader is behind; batches of reads."""

from __future__ import annotations

import pytest

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


def noted(*batches: tuple[int, int, float]) -> ReadDelay:
    delay = ReadDelay()
    for nbytes, messages, at in batches:
        delay.note(nbytes, messages, at)
    return delay


def test_rare_input_is_read_at_once_and_steady_input_is_gathered() -> None:
    delay = noted((500, 5, 10.0))

    assert delay.seconds(GATHER, LATE) == READ_DELAY
    assert delay.seconds(GATHER, SOON) == GATHER


def test_as_many_bytes_are_behind_only_in_a_short_time() -> None:
    half = BEHIND_BYTES // 2

    assert noted((half, 100, 10.0), (half + 100, 100, 10.0)).seconds(GATHER, SOON) == BEHIND_READ_DELAY
    assert noted((half, 100, 10.0), (half, 100, 10.0 + STEADY_READ_DELAY)).seconds(GATHER, SOON) == GATHER


def test_a_longer_wait_may_gather_more() -> None:
    delay = noted((500, 5, 10.0))
    delay.seconds(2 * STEADY_READ_DELAY, SOON)
    delay.note(BEHIND_BYTES + 100, 100, 10.0 + 2 * STEADY_READ_DELAY)

    assert delay.seconds(GATHER, SOON) == GATHER


def test_a_read_waits_until_the_buffers_are_about_full() -> None:
    fast = noted((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.004))
    faster = noted((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.002))

    assert fast.seconds(GATHER, SOON) == pytest.approx(READ_BYTES / LARGE * 0.004)
    assert faster.seconds(GATHER, SOON) == READ_DELAY


def test_many_small_batches_in_a_short_time_are_behind() -> None:
    delay = noted(*((BEHIND_BYTES // 2, 100, 10.0 + i / 1000) for i in range(10)))

    assert delay.seconds(GATHER, SOON) == BEHIND_READ_DELAY


def test_large_messages_are_read_sooner_and_a_commit_between_them_changes_nothing() -> None:
    delay = noted((LARGE, 1, 10.0), (150, 3, 10.001))

    assert delay.seconds(GATHER, SOON) == READ_DELAY


def test_the_reader_is_behind_for_a_moment_after_the_last_input() -> None:
    end = 10.0 + BEHIND_AT_MOST * BEHIND_READ_DELAY

    assert noted((LARGE, 9_000, 10.0), (1, 1, end - 2 * BEHIND_READ_DELAY)).seconds(GATHER, SOON) == BEHIND_READ_DELAY
    assert noted((LARGE, 9_000, 10.0), (1, 1, end)).seconds(GATHER, SOON) == GATHER


def far_behind(nbytes: int, messages: int) -> ReadDelay:
    """Return the delay after 20 reads of this size, one in each BEHIND_READ_DELAY."""
    return noted(*((nbytes, messages, 10.0 + i * BEHIND_READ_DELAY) for i in range(20)))


def test_reads_are_collected_only_at_a_rate_that_fills_a_batch_in_time() -> None:
    enough = int(BATCH_BYTES * BEHIND_READ_DELAY / BATCH_SECONDS) + 1000

    assert far_behind(enough, 4_000).batch_seconds == BATCH_SECONDS
    assert far_behind(enough // 2, 4_000).batch_seconds == 0
    assert noted((LARGE, 9_000, 10.0), (LARGE, 9_000, 10.010), (500, 5, 10.1)).batch_seconds == 0


def test_large_messages_are_not_collected() -> None:
    assert far_behind(LARGE, 2).batch_seconds == 0
