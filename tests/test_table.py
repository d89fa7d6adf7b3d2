"""TableSchema: what an `s` row carries is what was meant, under any names."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.table import (
    SCHEMA_FORMAT,
    CatalogFingerprint,
    Column,
    ReplicaIdentity,
    TableSchema,
    TableState,
    exact_glob,
    matches,
    matches_name,
    split_topic,
    topic,
)

names = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1, max_size=63)
columns = st.builds(
    Column,
    id=st.integers(1, 1600),
    name=names,
    type_oid=st.integers(1, 2**32 - 1),
    type_name=names,
    typmod=st.integers(-1, 2**31 - 1),
    not_null=st.booleans(),
    generated=st.booleans(),
    base_type_oid=st.none() | st.integers(1, 2**32 - 1),
    missing=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    default=st.none() | names,
    labels=st.lists(names, max_size=3).map(tuple),
)
standings = st.builds(
    CatalogFingerprint,
    persistence=st.sampled_from("pu"),
    file=st.integers(0, 2**32 - 1),
    attributes=st.lists(st.tuples(st.integers(1, 1600), names), max_size=3).map(tuple),
    leaves=st.lists(st.tuples(st.integers(1, 99), st.integers(1, 99)), max_size=3).map(tuple),
    published=st.none() | st.lists(names, max_size=7).map(tuple),
)
schemas = st.builds(
    TableSchema,
    relation=st.integers(1, 2**62),
    oid=st.integers(1, 2**32 - 1),
    schema=names,
    name=names,
    replica_identity=st.sampled_from(ReplicaIdentity),
    columns=st.lists(columns, max_size=6, unique_by=lambda c: c.id).map(tuple),
    state=st.sampled_from(TableState),
    reason=st.none() | st.text(st.characters(exclude_categories=["Cs"])),
    root=st.none() | st.integers(1, 2**32 - 1),
    standing=st.none() | standings,
    witness=st.none() | names,
)


def column(number: int, **fields: object) -> Column:
    return Column(**{"id": number, "name": f"c{number}", "type_oid": 23, "type_name": "integer", **fields})  # type: ignore[arg-type]


def table(*of: Column) -> TableSchema:
    return TableSchema(
        relation=7, oid=7, schema="shop", name="orders", replica_identity=ReplicaIdentity.DEFAULT, columns=of
    )


@given(schemas)
def test_a_schema_survives_its_json(schema: TableSchema) -> None:
    assert TableSchema.from_json(schema.to_json()) == schema


@given(schemas)
def test_equal_versions_are_equal_bytes(schema: TableSchema) -> None:
    assert TableSchema.from_json(schema.to_json()).to_json() == schema.to_json()


def test_a_newer_format_is_refused() -> None:
    payload = json.loads(table(column(1)).to_json()) | {"format": SCHEMA_FORMAT + 1}

    with pytest.raises(ValueError, match="reads formats up to"):
        TableSchema.from_json(json.dumps(payload))


def test_the_key_is_in_key_order_not_in_column_order() -> None:
    schema = table(column(1, key=1), column(2), column(3, key=0))

    assert [c.id for c in schema.key] == [3, 1]


def test_generated_columns_are_not_sent() -> None:
    assert [c.id for c in table(column(1), column(2, generated=True), column(5)).sent] == [1, 5]


def test_a_domain_is_looked_through() -> None:
    assert column(1, base_type_oid=1700, base_typmod=655366).value_type == (1700, 655366)
    assert column(1, typmod=9).value_type == (23, 9)


def test_a_column_is_found_by_its_name_or_not_at_all() -> None:
    schema = table(column(1), column(2))

    assert schema.column("c2") == schema.columns[1]
    assert schema.column("c3") is None


def test_a_flagged_version_says_why_and_keeps_its_shape() -> None:
    schema = table(column(1))
    flagged = schema.flagged(TableState.NEEDS_RESYNC, "a type was rewritten")

    assert (flagged.state, flagged.reason) == (TableState.NEEDS_RESYNC, "a type was rewritten")
    assert flagged.columns == schema.columns
    assert flagged.topic == "shop.orders"


def test_a_row_of_the_first_format_is_still_read() -> None:
    fields = json.loads(table(column(1)).to_json()) | {"format": 1}
    for later in ("root", "standing", "witness"):
        del fields[later]
    fields["columns"] = [{k: v for k, v in c.items() if k not in {"default", "labels"}} for c in fields["columns"]]

    assert TableSchema.from_json(json.dumps(fields)) == table(column(1))


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        (("a", "b"), ("a", "x", "b"), True),
        ((), ("a",), True),
        (("a", "b"), ("c", "b"), False),
        (("a", "b"), ("b", "a"), False),
        (("a",), (), True),
    ],
)
def test_labels_that_are_gone_or_moved_were_renamed(
    before: tuple[str, ...], after: tuple[str, ...], kept: bool
) -> None:
    assert column(1, labels=before).keeps_labels(after) is kept


@pytest.mark.parametrize(
    ("schema", "name", "text"),
    [
        ("shop", "orders", "shop.orders"),
        ("s.x", "y", '"s.x".y'),
        ("s", "x.y", 's."x.y"'),
        ('a"b', "c\nd", '"a""b".c\nd'),
    ],
)
def test_a_topic_tells_schema_and_name_apart(schema: str, name: str, text: str) -> None:
    assert topic(schema, name) == text
    assert split_topic(text) == (schema, name)


def test_a_text_that_is_no_topic_has_no_schema() -> None:
    assert split_topic("orders") == ("", "orders")


def test_a_glob_matches_the_whole_topic_with_its_case() -> None:
    assert matches("shop.orders", ["sales.*", "shop.*"])
    assert not matches("shop.orders", ["orders", "shop.Orders", "hop.orders"])
    assert not matches("shop.orders", [])


@pytest.mark.parametrize(
    ("topic", "glob"),
    [
        ("shop.orders", "orders"),
        ("shop.orders", "o*"),
        ("shop.orders", "shop.*"),
        ('"s.x".orders', "orders"),
        ('shop."a.b"', '"a.b"'),
        ('shop."a.b"', 'shop."a.b"'),
    ],
)
def test_a_bare_name_means_a_table_of_any_schema(topic: str, glob: str) -> None:
    assert matches_name(topic, ["nothing", glob])


@pytest.mark.parametrize(
    ("topic", "glob"),
    [
        ("shop.orders", "order"),
        ("shop.orders", "sales.orders"),
        ("shop.orders", "shop"),
        ('shop."x.orders"', "orders*"),
    ],
)
def test_a_bare_name_means_a_whole_name(topic: str, glob: str) -> None:
    assert not matches_name(topic, [glob])


@given(names, names, names)
def test_a_glob_made_of_a_topic_matches_it_alone(schema: str, name: str, other: str) -> None:
    glob = exact_glob(topic(schema, name))
    assert matches(topic(schema, name), [glob])
    assert matches(topic(schema, other), [glob]) == (other == name)
