"""Noted: how long ago something was, whatever was done to the clock since."""

from __future__ import annotations

import pytest

from cdc.boot_clock import SECOND, BootTimestamp

NOTED = BootTimestamp(1_000 * SECOND, "first", 50 * SECOND)


@pytest.mark.parametrize("clock_us", [0, 1_000 * SECOND, 9_999 * SECOND])
def test_in_one_life_of_a_machine_the_clock_is_not_asked(clock_us: int):
    assert BootTimestamp(clock_us, "first", 57 * SECOND).since(NOTED) == 7 * SECOND


@pytest.mark.parametrize("later", [BootTimestamp(1_009 * SECOND, "second", SECOND), BootTimestamp(1_009 * SECOND)])
def test_of_two_lives_or_machines_the_clocks_tell(later: BootTimestamp):
    assert later.since(NOTED) == 9 * SECOND
    assert NOTED.since(later) == -9 * SECOND


def test_this_machine_goes_on():
    noted, now = BootTimestamp.now(), BootTimestamp.now()
    assert now.boot == noted.boot
    assert 0 <= now.since(noted) < 60 * SECOND
