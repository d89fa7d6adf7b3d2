"""Dates, times and intervals; more cases are in data/debezium_types.json."""

from __future__ import annotations

import datetime as dt

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.formats import temporal_values
from cdc.delivery.formats.temporal_values import days_of_date

ODD = {
    "epoch_days": "infinity",
    "epoch_micros": "infinity",
    "epoch_millis": "infinity",
    "iso_dates": "12024-01-02",
    "iso_timestamps": "12024-01-02 00:00:00",
}
"""A text that makes a function convert every text on its own."""


@given(st.dates())
def test_days_are_those_of_the_standard_library(date: dt.date) -> None:
    assert days_of_date(date.year, date.month, date.day) == (date - dt.date(1970, 1, 1)).days


@given(st.lists(st.datetimes(), min_size=1, max_size=10))
def test_whole_arrays_and_single_texts_give_the_same(times: list[dt.datetime]) -> None:
    texts = [time.isoformat(sep=" ").rstrip("0") if time.microsecond else time.isoformat(sep=" ") for time in times]
    for name, odd in ODD.items():
        given_texts = [text[:10] for text in texts] if name in {"epoch_days", "iso_dates"} else texts
        convert = getattr(temporal_values, name)
        whole = convert(pa.array(given_texts)).to_pylist()
        assert convert(pa.array([*given_texts, odd])).to_pylist()[:-1] == whole
    zoned = [f"{text}+00" for text in texts]
    convert = temporal_values.zoned_timestamps(6)
    assert convert(pa.array([*zoned, "infinity"])).to_pylist()[:-1] == convert(pa.array(zoned)).to_pylist()


@pytest.mark.parametrize(
    ("text", "micros", "iso"),
    [
        ("00:00:00", 0, "P0Y0M0DT0H0M0S"),
        ("-00:00:00.000001", -1, "P0Y0M0DT0H0M-0.000001S"),
        ("1 mon -1 days", 2_543_400_000_000, "P0Y1M-1DT0H0M0S"),
        ("-1 years -2 mons +3 days -04:05:06.5", -36_572_706_500_000, "P-1Y-2M3DT-4H-5M-6.5S"),
        ("00:00:10", 10_000_000, "P0Y0M0DT0H0M10S"),
        ("178000000 years", None, "P178000000Y0M0DT0H0M0S"),
        ("infinity", None, None),
    ],
)
def test_an_interval_is_approximate_microseconds_or_iso_8601(text: str, micros: int | None, iso: str | None) -> None:
    texts = pa.array([text])
    expected = None if micros is None else str(micros)
    assert temporal_values.interval_micros(texts).to_pylist() == [expected]
    assert temporal_values.iso_intervals(texts).to_pylist() == [None if iso is None else f'"{iso}"']


def test_a_time_that_does_not_fit_is_null() -> None:
    assert temporal_values.epoch_micros(pa.array(["294276-12-31 23:59:59.999999"])).to_pylist() == [None]
    assert temporal_values.iso_timestamps(pa.array(["infinity"])).to_pylist() == [None]
    assert temporal_values.zoned_timestamps(6)(pa.array(["2024-01-02 10:00:00+05"])).to_pylist() == [None]
    assert temporal_values.iso_times(pa.array(["24:00:00", "10:00:00.50"])).to_pylist() == [
        '"00:00:00Z"', '"10:00:00.5Z"',
    ]  # fmt: skip


def test_milliseconds_before_1970_are_rounded_down() -> None:
    texts = pa.array(["1969-12-31 23:59:59.999999", "1969-12-31 23:59:59.999", "1969-12-31 23:59:59", None])
    assert temporal_values.epoch_millis(texts).to_pylist() == ["-1", "-1", "-1000", None]
    assert temporal_values.epoch_millis(pa.array([texts[0].as_py(), "infinity"])).to_pylist()[0] == "-1"
