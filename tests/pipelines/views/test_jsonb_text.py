"""Text of jsonb: Postgres builds the same random values with its own functions, and prints them."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from psycopg import sql

from pipelines.views.jsonb_text import jsonb_text
from tests.fixtures.postgres import open_session

DAY = 86_400_000_000
MICROS = st.integers(-2_440_588 * DAY, 2**63 - 1) | st.integers(0, 10**16)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)
SCALARS: dict[pa.DataType, tuple[str, st.SearchStrategy[Any]]] = {
    pa.bool_(): ("{}::boolean", st.booleans()),
    pa.int8(): ("{}::smallint", st.integers(-128, 127)),
    pa.int64(): ("({})::bigint", st.integers(-(2**63), 2**63 - 1)),
    pa.float32(): ("{}::float8::real", st.floats(width=32)),
    pa.float64(): ("{}::float8", st.floats()),
    pa.decimal128(38, 20): ("{}::numeric(38,20)", st.decimals(-(10**17), 10**17, places=20)),
    pa.decimal128(5, 0): ("{}::numeric(5)", st.decimals(-99_999, 99_999, places=0)),
    pa.string(): ("{}::text", TEXTS),
    pa.binary(): ("{}::bytea", st.binary(max_size=4)),
    pa.date32(): ("'1970-01-01'::date + {}::int", st.integers(-2_440_588, 2_145_042_905)),
    pa.timestamp("us"): ("'1970-01-01'::timestamp + {}", MICROS),
    pa.timestamp("us", tz="UTC"): ("'1970-01-01+00'::timestamptz + {}", MICROS),
}
"""Type → expression of Postgres for a value, and values."""
Nested = tuple[pa.DataType, st.SearchStrategy[Any]]


def scalars(*, are_keys: bool = False) -> st.SearchStrategy[Nested]:
    kinds = [(kind, values) for kind, (_, values) in SCALARS.items()]
    if are_keys:
        return st.sampled_from(kinds)
    return st.sampled_from([*((kind, st.none() | values) for kind, values in kinds), (pa.null(), st.none())])


def nested(inner: st.SearchStrategy[Nested]) -> st.SearchStrategy[Nested]:
    names = st.sampled_from(["a", "b", "bb", "é", "Z", "", 'q"\\'])
    structs = st.lists(st.tuples(names, inner), max_size=4, unique_by=lambda field: field[0]).map(
        lambda fields: (
            pa.struct([(name, kind) for name, (kind, _) in fields]),
            st.none() | st.fixed_dictionaries({name: values for name, (_, values) in fields}),
        )
    )
    lists = inner.map(lambda of: (pa.list_(of[0]), st.none() | st.lists(of[1], max_size=3)))
    maps = st.tuples(scalars(are_keys=True), inner).map(
        lambda of: (pa.map_(of[0][0], of[1][0]), st.none() | st.lists(st.tuples(of[0][1], of[1][1]), max_size=4))
    )
    return structs | lists | maps


ROWS = st.recursive(scalars(), nested, max_leaves=6).flatmap(
    lambda of: st.tuples(st.just(of[0]), st.lists(of[1], min_size=1, max_size=4))
)


def scalar(value: Any, kind: pa.DataType) -> sql.Composable:
    if pa.types.is_null(kind) or value is None:
        return sql.SQL("NULL::text")
    literal: sql.Composable = sql.Literal(value)
    if pa.types.is_timestamp(kind):
        days, rest = divmod(value, DAY)
        literal = sql.SQL("make_interval(days => {}) + {}::bigint * '1 us'::interval").format(days, rest)
    elif pa.types.is_floating(kind):
        literal = sql.Literal(repr(value))
    return sql.SQL(SCALARS[kind][0]).format(literal)  # type: ignore[arg-type]


def as_jsonb(value: Any, kind: pa.DataType) -> sql.Composable:
    """An expression of Postgres that builds the jsonb of a value."""
    if not pa.types.is_nested(kind) or value is None:
        return sql.SQL("coalesce(to_jsonb({}), 'null')").format(scalar(value, pa.null() if value is None else kind))
    if pa.types.is_list(kind):
        elements = [as_jsonb(element, kind.value_type) for element in value]
        return sql.SQL("jsonb_build_array({})").format(sql.SQL(", ").join(elements))
    if pa.types.is_struct(kind):
        members = [sql.SQL("{}::text, {}").format(f.name, as_jsonb(value[f.name], f.type)) for f in kind]
        return sql.SQL("jsonb_build_object({})").format(sql.SQL(", ").join(members))
    pairs = [sql.SQL("({}, {})").format(scalar(k, kind.key_type), as_jsonb(v, kind.item_type)) for k, v in value]
    query = "(SELECT jsonb_object_agg(k, v) FROM (VALUES {}) AS t (k, v))" if pairs else "'{{}}'::jsonb"
    return sql.SQL(query).format(sql.SQL(", ").join(pairs))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def dsn(postgres) -> str:
    return postgres.dsn()


@given(ROWS, st.integers(0, 1))
@example((pa.int64(), [-(2**63), 2**63 - 1]), 0)
def test_random_values_have_the_text_of_postgres(dsn: str, rows: tuple[pa.DataType, list[Any]], first: int) -> None:
    kind, values = rows
    query = sql.SQL("SELECT {}").format(
        sql.SQL(", ").join(sql.SQL("({})::text").format(as_jsonb(v, kind)) for v in values)
    )
    expected = open_session(dsn).execute(query).fetchone()
    texts = jsonb_text(pa.array(values, kind).slice(first)).to_pylist()

    assert expected is not None
    assert ["null" if text is None else text for text in texts] == list(expected[first:])
    assert [text is None for text in texts] == [value is None for value in values[first:]]


def test_values_are_printed_like_this() -> None:
    kind = pa.struct(
        [("items", pa.list_(pa.struct([("quantity", pa.int32()), ("sku", pa.string())]))), ("id", pa.int64())]
    )
    document = {"items": [{"quantity": 2, "sku": 'a"b'}, {"quantity": None, "sku": None}, None], "id": 7}

    assert jsonb_text(pa.array([document, None, {"items": [], "id": None}], kind)).to_pylist() == [
        '{"id": 7, "items": [{"sku": "a\\"b", "quantity": 2}, {"sku": null, "quantity": null}, null]}',
        None,
        '{"id": null, "items": []}',
    ]


def test_keys_are_in_the_order_of_jsonb() -> None:
    keys = ["é", "aa", "b", "A", "a", "", "ab", "B"]
    expected = '{"": 5, "A": 3, "B": 7, "a": 4, "b": 2, "aa": 1, "ab": 6, "é": 0}'
    struct = pa.StructArray.from_arrays([pa.array([place]) for place in range(len(keys))], names=keys)

    assert jsonb_text(struct).to_pylist() == [expected]
    entries = [(key, place) for place, key in enumerate(keys)]
    assert jsonb_text(pa.array([entries], pa.map_(pa.string(), pa.int8()))).to_pylist() == [expected]


@pytest.mark.parametrize(
    ("number", "text"),
    [(-0.0, "0"), (1e20, "1" + "0" * 20), (-1.5e-7, "-0.00000015"), (float("nan"), '"NaN"'), (-1e400, '"-Infinity"')],
)
def test_a_float_has_no_exponent(number: float, text: str) -> None:
    assert jsonb_text(pa.array([number])).to_pylist() == [text]


def test_of_equal_keys_the_last_one_stays() -> None:
    twice = pa.StructArray.from_arrays([pa.array([1]), pa.array(["x"])], names=["a", "a"])
    maps = pa.array([[("b", 1), ("b", 2), ("a", 3)], None, [("b", 4)]], pa.map_(pa.string(), pa.int32()))

    assert jsonb_text(twice).to_pylist() == ['{"a": "x"}']
    assert jsonb_text(maps).to_pylist() == ['{"a": 3, "b": 2}', None, '{"b": 4}']


def test_what_null_hides_is_not_printed() -> None:
    maps = pa.MapArray.from_arrays([0, 1, 2], ["a", "b"], pa.array([1, 2]))
    lists = pa.ListArray.from_arrays([0, 1, 2], pa.array([1, 2]))
    hidden = pa.StructArray.from_arrays([maps, lists], names=["m", "l"], mask=pa.array([True, False]))

    assert jsonb_text(hidden).to_pylist() == [None, '{"l": [2], "m": {"b": 2}}']
    assert [jsonb_text(part).to_pylist() for part in hidden.flatten()] == [[None, '{"b": 2}'], [None, "[2]"]]


@pytest.mark.parametrize("texts", [["\0"], ["a", "b\0c"]])
def test_a_character_that_no_jsonb_has_is_refused(texts: list[str]) -> None:
    with pytest.raises(pa.ArrowInvalid, match=r"U\+0000"):
        jsonb_text(pa.array([texts]))
