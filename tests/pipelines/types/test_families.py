"""Every type family on literal texts as Postgres prints them under the pinned session settings."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.types.families import (
    EXACT_BY_OID,
    TEXT,
    ColumnPolicies,
    TypePolicy,
    array_family,
    declared_as,
    family_of,
    numeric_modifier,
    precision_and_scale,
)
from pipelines.types.postgres_text import to_postgres_text
from tests.contracts.folded import column


def family(oid: int, typmod: int = -1, policy: TypePolicy = TypePolicy.EXACT, **more):
    return family_of(column(1, "c", oid=oid, typmod=typmod, **more), policy)


EXACT = [
    (16, -1, "t", True),
    (16, -1, "f", False),
    (21, -1, "-32768", -32768),
    (23, -1, "2147483647", 2147483647),
    (20, -1, "-9223372036854775808", -(2**63)),
    (26, -1, "4294967295", 4294967295),
    (700, -1, "3.4028235e+38", 3.4028234663852886e38),
    (701, -1, "0.1", 0.1),
    (701, -1, "5e-324", 5e-324),
    (701, -1, "-Infinity", -math.inf),
    (1700, numeric_modifier(10, 2), "-12345678.90", Decimal("-12345678.90")),
    (1700, numeric_modifier(38, 38), "0." + "0" * 37 + "1", Decimal("1E-38")),
    (1700, numeric_modifier(38, 0), "9" * 38, Decimal("9" * 38)),
    (1082, -1, "0001-01-01", date(1, 1, 1)),
    (1114, -1, "9999-12-31 23:59:59.999999", datetime(9999, 12, 31, 23, 59, 59, 999999)),  # noqa: DTZ001 - has no zone
    (1114, -1, "2024-02-29 10:00:00.1", datetime(2024, 2, 29, 10, 0, 0, 100000)),  # noqa: DTZ001 - has no zone
    (1184, -1, "1900-01-01 00:00:00+00", datetime(1900, 1, 1, tzinfo=UTC)),
    (17, -1, "\\x00ff", b"\x00\xff"),
    (17, -1, "\\x", b""),
]

TEXTS = [
    (25, -1, ""),
    (2950, -1, "a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"),
    (1083, -1, "24:00:00"),
    (1186, -1, "1 mon -00:00:01"),
    (1700, -1, "NaN"),
    (1700, numeric_modifier(39, 2), "1.00"),
    (1700, numeric_modifier(3, 5), "0.00123"),
    (1700, numeric_modifier(3, -2), "12300"),
]

REFUSED = [
    (16, -1, "true"),
    (16, -1, ""),
    (21, -1, "32768"),
    (1700, numeric_modifier(10, 2), "NaN"),
    (1700, numeric_modifier(4, 2), "100.00"),
    (1700, numeric_modifier(4, 2), "1.001"),
    (1082, -1, "infinity"),
    (1082, -1, "0044-03-15 BC"),
    (1082, -1, "10000-01-01"),
    (1114, -1, "-infinity"),
    (1114, -1, "0044-03-15 10:00:00 BC"),
    (1114, -1, "10000-01-01 00:00:00"),
    (1184, -1, "infinity"),
    (1184, -1, "0044-03-15 10:00:00+00 BC"),
    (17, -1, "\\x0"),
    (17, -1, "\\xzz"),
    (17, -1, "abcd"),
    (17, -1, ""),
    (17, -1, "\\"),
    (17, -1, "\\xAB"),
]


TEXT_LIST = pa.list_(pa.field("element", pa.string()))
NUMBER_LIST = pa.list_(pa.field("element", pa.int32()))
NO_ARRAYS = [
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


@pytest.mark.parametrize(("oid", "typmod", "text", "value"), EXACT)
def test_a_value_is_converted_exactly_between_nulls(oid, typmod, text, value):
    found = family(oid, typmod)
    converted = found.convert(pa.array([None, text, None], pa.string()))

    assert converted.type == found.arrow
    assert converted.to_pylist() == [None, value, None]


@pytest.mark.parametrize(("oid", "typmod", "text"), TEXTS)
def test_a_type_without_an_exact_family_stays_text(oid, typmod, text):
    assert family(oid, typmod).convert(pa.array([text])).to_pylist() == [text]


@pytest.mark.parametrize(("oid", "typmod", "text"), REFUSED)
def test_a_value_that_does_not_fit_is_refused(oid, typmod, text):
    with pytest.raises(pa.ArrowInvalid):
        family(oid, typmod).convert(pa.array([text]))


@pytest.mark.parametrize(("oid", "typmod", "text"), [*REFUSED, *TEXTS])
def test_the_policy_text_keeps_every_text(oid, typmod, text):
    assert family(oid, typmod, TypePolicy.TEXT).convert(pa.array([text, None])).to_pylist() == [text, None]


def test_nan_and_negative_zero_are_kept():
    nan, zero = family(701).convert(pa.array(["NaN", "-0"])).to_pylist()

    assert math.isnan(nan)
    assert math.copysign(1, zero) == -1


def test_a_domain_has_the_family_of_its_base():
    assert family(99999, base_type_oid=1700, base_typmod=numeric_modifier(5, 1), type_kind="d").arrow == pa.decimal128(
        5, 1
    )


@given(st.lists(st.none() | st.binary(max_size=9)), st.integers(0, 3))
def test_bytea_survives_its_hexadecimal_form_in_any_slice(values, start):
    texts = pa.array([None if value is None else "\\x" + value.hex() for value in values], pa.string())

    assert EXACT_BY_OID[17].convert(texts.slice(start)).to_pylist() == values[start:]


@given(st.integers(1, 1000), st.integers(-1000, 1000))
def test_a_numeric_modifier_has_precision_and_scale(precision, scale):
    assert numeric_modifier(10, 2) == 655366
    assert precision_and_scale(numeric_modifier(precision, scale)) == (precision, scale)


WITHOUT_ZERO = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5)


@given(st.lists(st.none() | st.lists(st.none() | WITHOUT_ZERO, max_size=4)), st.integers(0, 3))
def test_lists_of_any_texts_survive_their_literals_in_any_slice(lists, start):
    literals = to_postgres_text(pa.array(lists, TEXT_LIST))

    assert array_family(TEXT).convert(literals.slice(start)).to_pylist() == lists[start:]


@pytest.mark.parametrize("text", NO_ARRAYS)
@pytest.mark.parametrize("others", [[], ["{1}", None], ['{"1"}']])
def test_a_text_that_is_no_array_of_one_dimension_is_refused(text, others):
    for element in (TEXT, EXACT_BY_OID[23]):
        with pytest.raises(pa.ArrowInvalid):
            array_family(element).convert(pa.array([*others, text], pa.string()))


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
    assert family_of(tags, own).arrow == NUMBER_LIST
    assert family_of(column(2, "n", "integer", oid=23), own) is TEXT
