"""Array literals are read and printed as Postgres does it."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.array_literal import array_literal, parse_array


@pytest.mark.parametrize(
    ("literal", "elements"),
    [
        ("{}", []),
        ("{1,NULL,3}", ["1", None, "3"]),
        ('{"",a}', ["", "a"]),
        ('{"NULL","null",nulls}', ["NULL", "null", "nulls"]),
        ('{"a,b","{c}","d e"}', ["a,b", "{c}", "d e"]),
        ('{"a\\"b","c\\\\d"}', ['a"b', "c\\d"]),
        ('{"line\nbreak"}', ["line\nbreak"]),
    ],
)
def test_a_literal_is_printed_as_it_was_read(literal, elements):
    assert parse_array(literal) == elements
    assert array_literal(elements) == literal


@pytest.mark.parametrize("literal", ["{{1},{2}}", "[0:1]={1,2}", "1,2", "{1", "{1,}", ""])
def test_another_text_is_refused(literal):
    with pytest.raises(pa.ArrowInvalid):
        parse_array(literal)
