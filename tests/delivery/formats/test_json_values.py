"""Numbers, bytes and arrays as JSON values; more cases are in data/debezium_types.json."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from decimal import Decimal

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.formats.json_values import (
    arrays,
    decimals,
    floats,
    hstore_objects,
    integers,
    money,
    variable_decimals,
    vectors,
)
from cdc.json_arrays import quoted


def _texts(*texts: str | None) -> pa.StringArray:
    return pa.array(texts, pa.string())


def _decimal_text(unscaled: int, scale: int) -> str:
    return format(Decimal(unscaled).scaleb(-scale), "f")


@given(st.lists(st.one_of(st.none(), st.integers(1 - 10**18, 10**18 - 1)), min_size=1), st.integers(0, 6))
def test_a_decimal_is_the_shortest_big_endian_number(numbers: list[int | None], scale: int) -> None:
    texts = _texts(*(None if one is None else _decimal_text(one, scale) for one in numbers))
    for one, value in zip(numbers, decimals(38, scale)(texts).to_pylist(), strict=True):
        if one is None:
            assert value is None
            continue
        content = b64decode(json.loads(value), validate=True)
        assert int.from_bytes(content, "big", signed=True) == one
        assert len(content) == (one if one >= 0 else ~one).bit_length() // 8 + 1


@given(st.lists(st.integers(1 - 10**38, 10**38 - 1), min_size=1))
def test_one_special_value_does_not_change_the_others(numbers: list[int]) -> None:
    convert = decimals(38, 0)
    whole = convert(_texts(*map(str, numbers))).to_pylist()
    assert convert(_texts(*map(str, numbers), "NaN")).to_pylist() == [*whole, None]
    wider = decimals(40, 0)(_texts(*map(str, numbers))).to_pylist()
    assert wider == whole


def test_a_decimal_with_a_negative_scale_has_no_zeros_at_its_end() -> None:
    content = b64encode((123).to_bytes(1, "big")).decode()
    assert decimals(5, -2)(_texts("12300")).to_pylist() == [f'"{content}"']


@pytest.mark.parametrize("digits", [1999, 2000, 2001, 4301, 50_000])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_of_many_digits_is_exact(digits: int, sign: int) -> None:
    number = sign * (10**digits - 7)
    value = json.loads(variable_decimals(_texts(format(Decimal(number), "f") + ".25"))[0].as_py())
    assert value["scale"] == 2
    assert int.from_bytes(b64decode(value["value"]), "big", signed=True) == number * 100 + sign * 25


def test_a_variable_decimal_has_no_zeros_after_the_point() -> None:
    assert [json.loads(one)["scale"] for one in variable_decimals(_texts("1.500", "100", "0.00")).to_pylist()] == [
        1, 0, 0,
    ]  # fmt: skip


def test_other_texts_than_numbers_are_null() -> None:
    assert integers(_texts("1", "***", "")).to_pylist() == ["1", None, None]
    assert floats(_texts("1e-05", "x", "NaN", "-Infinity")).to_pylist() == ["1e-05", None, '"NaN"', '"-Infinity"']
    assert money(2)(_texts("free", "($0.05)")).to_pylist() == [None, '"+w=="']
    assert vectors(_texts("[1,2]", "x")).to_pylist() == ["[1,2]", None]


def test_arrays_keep_null_elements_and_refuse_more_dimensions() -> None:
    texts = _texts("{1,NULL,2}", "{}", None, "{{1},{2}}", "[5:6]={3,4}")
    assert arrays(integers)(texts).to_pylist() == ["[1,null,2]", "[]", None, None, "[3,4]"]
    assert arrays(integers)(_texts("{1,NULL,2}", None, "{7}")).to_pylist() == ["[1,null,2]", None, "[7]"]
    assert arrays(quoted)(_texts('{"NULL",NULL,"a\\"b"}')).to_pylist() == ['["NULL",null,"a\\"b"]']


def test_an_element_that_cannot_be_represented_makes_its_array_null() -> None:
    assert arrays(decimals(10, 2))(_texts("{1.20,NaN}", "{3.40,NULL}", "{}")).to_pylist() == [
        None, '["AVQ=",null]', "[]",
    ]  # fmt: skip


def test_hstore_unescapes_keys_and_values() -> None:
    assert hstore_objects(_texts('"a\\"b"=>"c\\\\d", "e"=>NULL', "", "a=>b")).to_pylist() == [
        '{"a\\"b":"c\\\\d","e":null}', "{}", None,
    ]  # fmt: skip


def test_money_of_a_locale_with_other_separators_is_null() -> None:
    texts = _texts("$1,234.56", "-$0.05", "1234.56", "1.234,56 €", "12,50 €", "1 234,50", "¥1,234", "Fr. 5.00")
    assert money(None)(texts).to_pylist() == [
        '"1234.56"', '"-0.05"', '"1234.56"', None, None, None, '"1234"', None,
    ]  # fmt: skip
