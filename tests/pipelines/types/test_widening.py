"""Widening: which types represent every value of another, and the text of values as Postgres prints it."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest

from pipelines.types.families import widening
from pipelines.types.postgres_text import to_postgres_text

NUMBERS = pa.list_(pa.field("element", pa.int32()))

EXACT = [
    ([-(2**31), None], pa.int32(), pa.int64()),
    ([1.5, None], pa.float32(), pa.float64()),
    ([Decimal("1.50"), None], pa.decimal128(10, 2), pa.decimal128(12, 4)),
    ([-(2**15)], pa.int16(), pa.decimal128(7, 2)),
    ([-(2**63)], pa.int64(), pa.decimal128(19, 0)),
    ([[1, None], None], NUMBERS, NUMBERS),
]
INEXACT = [
    (pa.int64(), pa.int32()),
    (pa.int64(), pa.float64()),
    (pa.int64(), pa.decimal128(18, 0)),
    (pa.float64(), pa.float32()),
    (pa.float64(), pa.decimal128(38, 10)),
    (pa.int32(), pa.decimal128(10, 1)),
    (pa.bool_(), pa.int32()),
    (pa.decimal128(10, 2), pa.decimal128(10, 3)),
    (pa.decimal128(10, 2), pa.decimal128(10, 1)),
    (pa.string(), pa.int32()),
    (NUMBERS, pa.list_(pa.field("element", pa.int64()))),
    (pa.date32(), pa.timestamp("us")),
]
AS_TEXT = [
    ([True, False, None], pa.bool_(), ["t", "f", None], False),
    ([7, None], pa.int16(), ["7", None], True),
    ([Decimal("0.0000000001"), None], pa.decimal128(20, 10), ["0.0000000001", None], True),
    ([date(1, 2, 3)], pa.date32(), ["0001-02-03"], True),
    ([b"\x00a", None], pa.binary(), ["\\x0061", None], False),
    ([0, 100], pa.timestamp("us"), ["1970-01-01 00:00:00", "1970-01-01 00:00:00.0001"], False),
    ([0], pa.timestamp("us", tz="UTC"), ["1970-01-01 00:00:00+00"], False),
    ([0.1, 1e23, None], pa.float64(), ["0.1", "9.999999999999999e+22", None], False),
    ([0.1, 1e6], pa.float32(), ["0.1", "1e+06"], False),
    ([[1, None], [], None], NUMBERS, ["{1,NULL}", "{}", None], False),
]


@pytest.mark.parametrize(("values", "before", "after"), EXACT)
@pytest.mark.parametrize("recast", [True, False])
def test_a_wider_type_holds_every_value(values, before, after, recast):
    convert = widening(before, after, recast=recast)

    assert convert is not None
    assert convert(pa.array(values, before)).equals(pa.array(values, after))


@pytest.mark.parametrize(("before", "after"), INEXACT)
@pytest.mark.parametrize("recast", [True, False])
def test_a_type_that_does_not_hold_every_value_is_no_widening(before, after, recast):
    assert widening(before, after, recast=recast) is None


@pytest.mark.parametrize(("values", "kind", "texts", "same_cast"), AS_TEXT)
def test_values_become_the_text_that_postgres_prints_where_its_own_cast_does_so_too(values, kind, texts, same_cast):
    assert to_postgres_text(pa.array(values, kind)).to_pylist() == texts
    assert widening(kind, pa.string(), recast=False) is to_postgres_text
    assert (widening(kind, pa.string(), recast=True) is to_postgres_text) == same_cast
