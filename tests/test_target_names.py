"""Names as paths and columns: cdc/target_names.py."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import InvalidDefinition
from cdc.target_names import column_name, name_of_column, name_of_segment, path_segment, published_uri, target_uri

NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=20)


@given(NAMES)
def test_a_path_segment_gives_back_its_name(name):
    assert name_of_segment(path_segment(name)) == name


@given(NAMES)
def test_a_column_gives_back_its_name(name):
    assert name_of_column(column_name(name)) == name


@given(NAMES)
def test_a_segment_is_safe_and_never_hidden(name):
    assert re.fullmatch(r"[a-z0-9~-][A-Za-z0-9_~-]*", path_segment(name))


@given(NAMES, NAMES)
def test_names_that_differ_stay_apart_also_where_case_is_folded(one, other):
    assert (path_segment(one).lower() == path_segment(other).lower()) == (one == other)
    assert (column_name(one) == column_name(other)) == (one == other)


@given(NAMES)
def test_a_column_has_no_sign_that_delta_or_sql_splits_at(name):
    assert not set(column_name(name)) & set(" ,;{}()\n\t=.`\"'")
    assert not column_name(name).startswith("_")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("s3://lake/{schema}/{table}", "s3://lake/_cdc/published"),
        ("/a/b/{schema}.{table}", "/a/b/_cdc/published"),
        ("/a/pre_{schema}/{table}", "/a/_cdc/published"),
        ("/{schema}/{table}", "/_cdc/published"),
        ("{schema}/{table}", "_cdc/published"),
        ("/fixed", "/fixed/_cdc/published"),
    ],
)
def test_the_record_lies_before_the_first_placeholder(template, expected):
    assert published_uri(template) == expected


def test_a_template_takes_encoded_names():
    assert target_uri("s3://lake/{schema}/{table}", "shop", "Orders.x") == "s3://lake/shop/~4Frders~2Ex"


def test_an_unknown_placeholder_is_refused():
    with pytest.raises(InvalidDefinition, match=r"'\{topic\}'"):
        target_uri("/a/{topic}", "shop", "orders")


@pytest.mark.parametrize("encode", [path_segment, column_name])
def test_an_empty_name_is_refused(encode):
    with pytest.raises(ValueError, match="empty"):
        encode("")
