"""Lsn: text and number are the same position."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cdc.errors import MalformedLsn
from cdc.lsn import Lsn

numbers = st.integers(0, 2**64 - 1)


@given(numbers)
def test_what_is_printed_is_read_back(number: int) -> None:
    assert Lsn.parse(str(Lsn(number))) == number


@given(numbers, numbers)
def test_lsns_are_ordered_as_their_numbers(one: int, other: int) -> None:
    assert (Lsn(one) < Lsn(other)) == (one < other)


@pytest.mark.parametrize(
    ("text", "number"),
    [("0/0", 0), ("16/B374D848", 0x16B374D848), ("FFFFFFFF/FFFFFFFF", 2**64 - 1), ("0/1ab", 0x1AB)],
)
def test_text_is_read_as_postgres_prints_it(text: str, number: int) -> None:
    assert Lsn.parse(text) == number


@given(st.text())
def test_any_text_is_an_lsn_or_malformed(text: str) -> None:
    try:
        lsn = Lsn.parse(text)
    except MalformedLsn:
        event("malformed")
    else:
        assert Lsn.parse(str(lsn)) == lsn


@pytest.mark.parametrize(
    "text", ["", "16", "/", "16/", "/16", "1/2/3", " 1/2", "1/2\n", "g/0", "123456789/0", "١/٢", "+1/2"]
)
def test_text_that_postgres_does_not_print_is_refused(text: str) -> None:
    with pytest.raises(MalformedLsn):
        Lsn.parse(text)


@pytest.mark.parametrize("number", [-1, 2**64])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(MalformedLsn, match="out of range"):
        Lsn(number)


def test_an_lsn_formats_and_represents_itself_as_text() -> None:
    assert f"{Lsn(0x16B374D848):>14}" == "   16/B374D848"
    assert repr(Lsn(1)) == "Lsn('0/1')"
