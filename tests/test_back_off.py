"""BackOff: pauses double up to the longest, also after any number of failures."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc.back_off import BackOff


def test_pauses_double_up_to_the_longest() -> None:
    assert [BackOff(0.5, 3.0).seconds(failures) for failures in range(1, 6)] == [0.5, 1.0, 2.0, 3.0, 3.0]


@given(st.integers(min_value=0, max_value=10**9), st.floats(min_value=0, max_value=5))
def test_no_pause_is_shorter_than_the_first_or_longer_than_the_longest(failures: int, jitter: float) -> None:
    assert 0.2 <= BackOff(0.2, 30.0, jitter).seconds(failures) <= 30.0
