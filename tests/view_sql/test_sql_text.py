"""The text of a view: places, tokens and what is no query."""

from __future__ import annotations

import pytest

from cdc.errors import ViewSqlInvalid
from cdc.view_sql.sql_text import SqlText, offset_of


def test_a_place_is_line_and_column_of_an_identifier() -> None:
    text = SqlText.parse("shop.v", "SELECT id,\n  `Größe` AS size\nFROM shop.t -- size")

    assert text.place_of("größe") == "2:3"
    assert text.place_of("SIZE") == "2:14"
    assert text.place_of("colour") is None


def test_a_name_in_a_string_is_no_identifier() -> None:
    assert SqlText.parse("shop.v", "SELECT 'x' AS y, x FROM shop.t").place_of("x") == "1:18"


def test_the_text_ends_before_comments_and_a_semicolon() -> None:
    text = SqlText.parse("shop.v", "-- orders\nSELECT id FROM shop.t; -- end")

    assert text.sql[text.start : text.end] == "SELECT id FROM shop.t"


def test_a_function_keeps_its_name_and_its_offset() -> None:
    text = SqlText.parse("shop.v", "SELECT Unix_Timestamp(a) FROM shop.t")
    (item,) = text.tree.selects

    assert (item.name, offset_of(item)) == ("Unix_Timestamp", 7)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("SELECT id,\nFROM WHERE", "view 'shop.v', 2:"),
        ("SELECT 'x", "does not parse"),
        ("INSERT INTO shop.t SELECT 1", "not one SELECT"),
        ("SELECT 1; SELECT 2", "not one SELECT"),
        ("", "not one SELECT"),
        ("VALUES (1)", "not one SELECT"),
    ],
)
def test_anything_but_one_query_is_an_error(sql: str, message: str) -> None:
    with pytest.raises(ViewSqlInvalid, match=message):
        SqlText.parse("shop.v", sql)
