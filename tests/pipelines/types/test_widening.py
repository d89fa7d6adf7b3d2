"""One column type as another: pipelines/types/widening.py, and arrays there and back: pipelines/types/array.py."""

from __future__ import annotations

from datetime import date
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.types import EXACT_BY_OID, ColumnPolicies, TypePolicy, declared_as, family_of
from pipelines.types.array import array_family
from pipelines.types.text import TEXT
from pipelines.types.widening import printed, widening
from tests.contracts.folded import column

TEXTS = pa.list_(pa.field("element", pa.string()))
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
    ([[1, None], [], None], NUMBERS, ["{1,NULL}", "{}", None], False),
]
BROKEN = [
    "",
    "{",
    "}",
    "1",
    "{1}}",
    "{1",
    "{1,}",
    "{,1}",
    "{1}x",
    '{"1}',
    '{"a"b}',
    "{{1}}",
    "[0:0]={1}",
    "{}{}",
    "{1}\n",
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
    assert printed(pa.array(values, kind)).to_pylist() == texts
    assert widening(kind, pa.string(), recast=False) is printed
    assert (widening(kind, pa.string(), recast=True) is printed) == same_cast


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64(), pa.list_(pa.field("element", pa.float64()))])
def test_floats_have_no_text_here(kind):
    assert widening(kind, pa.string(), recast=False) is None


@given(st.lists(st.none() | st.lists(st.none() | st.text(max_size=5), max_size=4)), st.integers(0, 3))
def test_lists_of_any_texts_survive_their_literals_in_any_slice(lists, start):
    literals = printed(pa.array(lists, TEXTS))

    assert array_family(TEXT).convert(literals.slice(start)).to_pylist() == lists[start:]


@pytest.mark.parametrize("text", BROKEN)
@pytest.mark.parametrize("beside", [[], ["{1}", None], ['{"1"}']])
def test_a_text_that_is_no_array_of_one_dimension_is_refused(text, beside):
    for element in (TEXT, EXACT_BY_OID[23]):
        with pytest.raises(pa.ArrowInvalid):
            array_family(element).convert(pa.array([*beside, text], pa.string()))


@pytest.mark.parametrize("arrow", [pa.string(), pa.decimal128(9, 4), *(f.arrow for f in EXACT_BY_OID.values())])
def test_every_type_of_a_column_is_declared_by_a_postgres_type(arrow):
    for kind in (arrow, pa.list_(pa.field("element", arrow))):
        oid, typmod = declared_as(kind)
        assert family_of(column(1, "c", "odd[]", oid=oid, typmod=typmod), TypePolicy.EXACT).arrow == kind


def test_an_array_in_the_key_and_a_column_with_a_policy_of_its_own_are_text():
    tags = column(1, "tags", "integer[]", oid=1007)
    own = ColumnPolicies(TypePolicy.TEXT, (("tags", TypePolicy.EXACT),))

    assert family_of(column(1, "tags", "integer[]", oid=1007, key=0), TypePolicy.EXACT) is TEXT
    assert family_of(tags, ColumnPolicies(TypePolicy.EXACT, (("tags", TypePolicy.TEXT),))) is TEXT
    assert family_of(tags, own).arrow == NUMBERS
    assert family_of(column(2, "n", "integer", oid=23), own) is TEXT
