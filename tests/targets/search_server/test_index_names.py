"""Names of indexes and documents: valid on every server, and different for different tables and keys."""

from __future__ import annotations

import re

import pytest

from cdc.targets.search_server.index_names import LONGEST, LONGEST_ID, alias_name, document_key, index_name, number_of

NAMES = (
    "orders",
    "Orders",
    "ORDERS",
    "a/b",
    "a\\b",
    "a*b",
    "a b",
    "é",
    "-x",
    "_x",
    "+x",
    ".x",
    "x.y",
    "x#",
    "x:y",
    "x,y",
)
VALID = re.compile(r"[a-z0-9~][a-z0-9._~-]*")


@pytest.mark.parametrize("template", ["{schema}.{table}", "shop-{table}"])
def test_every_name_of_a_table_has_an_alias_of_its_own(template):
    aliases = [alias_name(template, "public", name) for name in NAMES]

    assert len(set(aliases)) == len(NAMES)
    assert all(VALID.fullmatch(alias) for alias in aliases)


def test_schema_and_table_are_apart():
    assert alias_name("{schema}.{table}", "a.b", "c") != alias_name("{schema}.{table}", "a", "b.c")


def test_a_long_name_ends_with_its_digest():
    one, other = (alias_name("{schema}.{table}", "s" * 63, "é" * 31 + last) for last in "xy")

    assert one != other
    assert max(len(one), len(other)) <= LONGEST
    assert len(index_name(one, 2**32 - 1, 99_999)) <= 255


def test_the_number_of_an_index_is_in_its_name():
    assert number_of(index_name("shop.orders", 16384, 12)) == 12


@pytest.mark.parametrize(
    ("key", "identity"),
    [(["42"], "42"), (["a b/c"], "a b/c"), (["1", "2"], '["1", "2"]'), (["1", None], '["1", null]')],
)
def test_an_id_shows_the_key(key, identity):
    assert document_key(key) == identity


def test_keys_that_cannot_be_ids_have_a_digest_each():
    keys: list[list[str | None]] = [[""], ["x" * 513], ["é" * 257], ["sha256:abc"], [None]]
    ids = [document_key(key) for key in keys]

    assert len(set(ids)) == len(keys)
    assert all(0 < len(identity.encode()) <= LONGEST_ID for identity in ids)


def test_a_key_of_exactly_the_longest_id_is_shown():
    assert document_key(["x" * LONGEST_ID]) == "x" * LONGEST_ID
