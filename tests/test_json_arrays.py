"""Arrays of texts as JSON."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.json_arrays import (
    concatenated,
    contains_only,
    each_distinct,
    listed,
    members,
    needs_escape,
    or_null,
    quoted,
)

TEXTS = st.lists(st.one_of(st.none(), st.text(st.characters(codec="utf-8"), max_size=12)), max_size=20)


@given(TEXTS, st.integers(0, 5))
def test_quoted_texts_are_json_strings(texts: list[str | None], start: int) -> None:
    array = pa.array([None, "x", *texts], pa.string())[start:]
    assert [None if one is None else json.loads(one) for one in quoted(array).to_pylist()] == array.to_pylist()


def test_only_the_bytes_of_a_slice_are_looked_at() -> None:
    texts = pa.array(['"', "a", None, "\n"])
    assert needs_escape(texts)
    assert not needs_escape(texts[1:3])
    assert contains_only(texts[1:3], frozenset(b"a"))
    assert not contains_only(texts, frozenset(b"a"))
    assert contains_only(texts[2:2], frozenset())


def test_pieces_are_joined_element_by_element() -> None:
    values = pa.array(["1", None])
    assert concatenated(["<", values, "|", "|", values, ">"]).to_pylist() == ["<1||1>", None]
    assert concatenated(members([('a"', or_null(values)), ("b", "null")])).to_pylist() == [
        '{"a\\"":1,"b":null}',
        '{"a\\"":null,"b":null}',
    ]


@pytest.mark.parametrize("width", [1, 2, 3])
def test_missing_values_are_left_out_of_a_list(width: int) -> None:
    columns = [pa.array(["1", None, "x,"]), pa.array([None, None, "2"]), pa.array(["3", None, None])][:width]
    expected = [["1", "", "x,"], ["1", "", "x,,2"], ["1,3", "", "x,,2"]][width - 1]
    assert listed(columns).to_pylist()[:2] == expected[:2]
    assert len(listed(columns)) == 3


def test_a_failed_conversion_of_one_text_is_null() -> None:
    assert each_distinct(pa.array(["1", "x", None, "1"]), lambda text: str(int(text) + 1)).to_pylist() == [
        "2", None, None, "2",
    ]  # fmt: skip


def test_texts_that_exceed_an_array_of_strings_become_large_strings() -> None:
    values = pa.array(["ab", None, "c"])
    pieces = ["<", values, "-", values[:3], ">"]
    assert concatenated(pieces).type == pa.string()
    large = concatenated(pieces, limit=14)
    assert large.type == pa.large_string()
    assert large.to_pylist() == concatenated(pieces, limit=15).to_pylist() == ["<ab-ab>", None, "<c-c>"]
    assert concatenated(pieces, limit=15).type == pa.string()
    assert concatenated(['{"a":', large, "}"]).to_pylist()[2] == '{"a":<c-c>}'
