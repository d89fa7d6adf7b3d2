"""Canonical text: the unit is one column; Python's own formatting is the foreign implementation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.verification.canonical_text import source_text, target_text


def shown(values: Sequence[object], kind: pa.DataType) -> list[str | None]:
    return target_text(pa.array(values, kind)).to_pylist()


def stamped(moment: datetime) -> str:
    text = moment.isoformat(sep=" ", timespec="microseconds")
    return text.rstrip("0").rstrip(".")


@given(st.lists(st.none() | st.datetimes()))
def test_timestamps_read_as_postgres_prints_them(moments: list[datetime | None]) -> None:
    expected = [None if m is None else stamped(m) for m in moments]
    assert shown(moments, pa.timestamp("us")) == expected
    aware = [None if m is None else m.replace(tzinfo=UTC) for m in moments]
    zoned = [None if text is None else text + "+00" for text in expected]
    assert shown(aware, pa.timestamp("us", tz="UTC")) == zoned


@given(st.lists(st.none() | st.dates(date(1, 1, 1))), st.lists(st.none() | st.times()))
def test_dates_and_times_read_as_postgres_prints_them(dates: list[date | None], times: list[time | None]) -> None:
    assert shown(dates, pa.date32()) == [None if d is None else d.isoformat() for d in dates]
    clock = [None if t is None else t.isoformat("microseconds").rstrip("0").rstrip(".") for t in times]
    assert shown(times, pa.time64("us")) == clock


@pytest.mark.parametrize(
    ("micros", "text"),
    [
        (-62_135_596_800_000_001, "0001-12-31 23:59:59.999999+00 BC"),
        (-210_863_520_000_000_000, "4713-01-01 00:00:00+00 BC"),
        (253_402_300_800_000_000, "10000-01-01 00:00:00+00"),
    ],
)
def test_moments_outside_of_four_digit_years_read_as_postgres_prints_them(micros: int, text: str) -> None:
    zoned = pa.array([micros], pa.int64()).cast(pa.timestamp("us", tz="UTC"))
    assert target_text(zoned).to_pylist() == [text]


@given(st.lists(st.none() | st.floats()))
def test_a_float_equals_its_shortest_text_and_no_neighbour(values: list[float | None]) -> None:
    texts = [None if v is None else postgres_float(v) for v in values]
    assert source_text(pa.array(texts, pa.string()), pa.float64()).to_pylist() == shown(values, pa.float64())
    moved = [None if v is None or not math.isfinite(v) else math.nextafter(v, math.inf) for v in values]
    for here, there in zip(shown(values, pa.float64()), shown(moved, pa.float64()), strict=True):
        assert here is None or here != there


@given(st.lists(st.none() | st.floats(width=32)))
def test_a_real_is_compared_by_its_32_bits(values: list[float | None]) -> None:
    reals = pa.array(values, pa.float32())
    texts = [None if v is None else postgres_float(v) for v in reals.to_pylist()]
    assert source_text(pa.array(texts, pa.string()), pa.float32()).to_pylist() == target_text(reals).to_pylist()


def postgres_float(value: float) -> str:
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return "NaN" if math.isnan(value) else repr(value)


@given(st.lists(st.none() | st.decimals(-(10**9), 10**9, allow_nan=False, places=10)))
def test_decimals_keep_their_scale_and_never_have_an_exponent(values: list[Decimal | None]) -> None:
    kind = pa.decimal128(20, 10)
    texts = [None if v is None else format(v, ".10f").replace("-0.0000000000", "0.0000000000") for v in values]
    assert shown(values, kind) == texts
    assert source_text(pa.array(texts, pa.string()), kind).to_pylist() == texts


def test_a_decimal_without_declared_scale_is_the_same_number_or_differs() -> None:
    texts = pa.array(["1.5", "-12", "0", "NaN", "0.123", None])
    expected = ["1.50", "-12.00", "0.00", "NaN", "0.123", None]
    assert source_text(texts, pa.decimal128(10, 2)).to_pylist() == expected


@given(st.lists(st.none() | st.binary()), st.integers(0, 3))
def test_bytes_are_hex_and_a_slice_is_its_own_rows(values: list[bytes | None], skipped: int) -> None:
    expected = [None if v is None else "\\x" + v.hex() for v in values]
    for kind in (pa.binary(), pa.large_binary(), pa.binary_view()):
        assert target_text(pa.array(values, kind).slice(skipped)).to_pylist() == expected[skipped:]


def test_null_and_the_empty_string_stay_apart() -> None:
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        assert shown(["", None, "NULL"], kind) == ["", None, "NULL"]


def test_booleans_are_letters_and_integers_digits() -> None:
    assert shown([True, False, None], pa.bool_()) == ["t", "f", None]
    assert shown([-1, None, 2**63 - 1], pa.int64()) == ["-1", None, str(2**63 - 1)]


def test_arrays_are_quoted_as_postgres_quotes_them() -> None:
    values = [["a b", "NULL", None, "", 'q"\\'], None, [], ["x"]]
    assert shown(values, pa.list_(pa.string())) == ['{"a b","NULL",NULL,"","q\\"\\\\"}', None, "{}", "{x}"]
    assert shown([[[1, 2], [3, 4]]], pa.list_(pa.list_(pa.int32()))) == ["{{1,2},{3,4}}"]
    floats = pa.list_(pa.float64())
    assert source_text(pa.array(["{1.5,NULL,2}"]), floats).to_pylist() == shown([[1.5, None, 2]], floats)


def test_a_column_without_rows_has_no_text() -> None:
    assert target_text(pa.chunked_array([], pa.int64())).to_pylist() == []
    assert shown([time(1), None][:0], pa.time64("us")) == []
