"""Number formats: short, with a unit, and a dash for unknown values."""

from __future__ import annotations

import pytest

from cdc.service import number_format


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0.4212, "0.42 s"), (12.0, "12 s"), (210.0, "3.5 min"), (7200.0, "2.0 h"), (259_200.0, "3.0 d")],
)
def test_a_duration_has_the_unit_that_suits_it(seconds: float | None, text: str) -> None:
    assert number_format.format_duration(seconds) == text


@pytest.mark.parametrize(("size", "text"), [(None, "–"), (0, "0 B"), (999, "999 B"), (16_777_216, "16.8 MB")])
def test_a_size_is_in_powers_of_1000(size: int | None, text: str) -> None:
    assert number_format.format_size(size) == text


def test_an_age_below_a_minute_has_whole_seconds() -> None:
    assert [number_format.format_age(seconds) for seconds in (0.4, 59.4, 59.6)] == ["0 s", "59 s", "60 s"]


def test_a_small_rate_keeps_its_fraction_and_a_large_one_gets_thin_spaces() -> None:
    assert [number_format.format_rate(rate) for rate in (None, 0, 5.25, 12_345.0)] == ["–", "0", "5.2", "12\u202f345"]


def test_a_lag_across_epochs_has_no_bytes() -> None:
    assert number_format.format_lag(None, 2.0) == "another epoch, 2.00 s"
    assert number_format.format_lag(10, None) == "10 B"


def test_one_thing_has_no_plural() -> None:
    assert [number_format.format_quantity(number, "file") for number in (1, 2, 1_200)] == [
        "1 file",
        "2 files",
        "1,200 files",
    ]
