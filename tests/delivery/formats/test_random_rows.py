"""Random rows: every format returns JSON that parses, and the same as a row-wise reference."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cdc.config.deliveries import DebeziumSettings
from cdc.table import Column, TableSchema
from tests.delivery.formats.changes import ID, changes_of, column, format_named, log_row, schema_with, values_of
from tests.delivery.formats.reference import NotEncodable, cdc_event, debezium_images
from tests.fixtures.examples import examples

TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_NUMBERS = st.integers(-(10**12), 10**12)
_SPECIAL = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


def _hundredths(number: int) -> str:
    return f"{'-' * (number < 0)}{abs(number) // 100}.{abs(number) % 100:02}"


def _any_of(*texts: str) -> st.SearchStrategy[str]:
    return st.sampled_from(texts)


TYPES: dict[str, tuple[int, int, st.SearchStrategy[str]]] = {
    "integer": (23, -1, st.integers(-(2**31), 2**31 - 1).map(str)),
    "bigint": (20, -1, st.integers(-(2**63), 2**63 - 1).map(str)),
    "boolean": (16, -1, _any_of("t", "f")),
    "text": (25, -1, TEXTS),
    "jsonb": (3802, -1, _any_of('{"a": "\\n"}', "[]", "null")),
    "numeric(20,2)": (1700, (20 << 16 | 2) + 4, _NUMBERS.map(_hundredths)),
    "numeric": (1700, -1, st.one_of(_NUMBERS.map(str), _any_of("NaN", "0.000", "1.500", "-Infinity"))),
    "double precision": (701, -1, st.floats().map(repr).map(lambda text: _SPECIAL.get(text, text))),
    "date": (1082, -1, _any_of("2024-02-29", "0001-01-01", "1969-12-31", "12024-01-02", "0044-03-15 BC", "infinity")),
    "time": (1083, -1, _any_of("00:00:00", "10:11:12.5", "23:59:59.999999", "24:00:00")),
    "timestamp": (
        1114,
        -1,
        _any_of("2024-02-29 00:00:00", "1900-01-01 10:11:12.5", "12024-01-02 00:00:00", "infinity"),
    ),
    "timestamptz": (1184, -1, _any_of("2024-02-29 10:11:12.5+00", "12024-02-29 10:11:12+00", "infinity")),
    "bytea": (17, -1, st.binary(max_size=5).map(lambda content: "\\x" + content.hex())),
    "integer[]": (1007, -1, _any_of("{}", "{1,NULL,3}", "{{1},{2}}", "[0:1]={7,8}", "{5}")),
    "text[]": (1009, -1, _any_of('{a,"b c"}', '{"x\\"y\\\\",NULL}', "{}")),
    "bit varying": (1562, -1, st.text("01", max_size=20)),
}


@st.composite
def schemas(draw: st.DrawFn) -> TableSchema:
    """A table with a key of one or two columns and columns of random types."""
    names = draw(st.lists(st.sampled_from(sorted(TYPES)), min_size=1, max_size=6))
    columns: list[Column] = [ID]
    for number, name in enumerate(names):
        oid, typmod, _ = TYPES[name]
        columns.append(column(f'{name} "{number}"', oid, name, typmod=typmod, not_null=draw(st.booleans())))
    return schema_with(*columns)


@st.composite
def rows_of(draw: st.DrawFn, schema: TableSchema) -> list[dict[str, Any]]:
    """Random changes of a table, key changes among them."""
    rows: list[dict[str, Any]] = []

    def image(key: str, complete: bool) -> dict[int, str | None]:
        found: dict[int, str | None] = {1: key}
        for one in schema.columns[1:]:
            if complete or draw(st.booleans()):
                found[one.id] = draw(st.one_of(st.none(), TYPES[one.type_name][2]))
        return found

    for number in range(draw(st.integers(1, 8))):
        op = draw(st.sampled_from("rcudtk"))
        key, ordinal = str(number + 1), len(rows)
        old = draw(st.one_of(st.none(), st.booleans()))
        before = None if old is None else image(key, old)
        if op == "k":
            rows.append(log_row("d", ordinal, key=[key], before=before))
            after = image(f"{key}0", draw(st.booleans()))
            rows.append(log_row("u", ordinal + 1, key=[f"{key}0"], old_key=[key], before=before, after=after))
        elif op == "t":
            rows.append(log_row("t", ordinal))
        elif op == "d":
            rows.append(log_row("d", ordinal, key=[key], before=before))
        else:
            after = image(key, op != "u" or draw(st.booleans()))
            rows.append(log_row(op, ordinal, key=[key], before=before if op == "u" else None, after=after))
    return rows


@st.composite
def tables(draw: st.DrawFn) -> tuple[TableSchema, list[dict[str, Any]]]:
    """A table and changes of it."""
    schema = draw(schemas())
    return schema, draw(rows_of(schema))


def _plain(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, **{name: None if row[name] is None else dict(row[name]) for name in ("before", "after")}}


@given(tables())
@examples(40)
def test_the_format_cdc_is_the_reference_and_loses_nothing(
    given_rows: tuple[TableSchema, list[dict[str, Any]]],
) -> None:
    schema, rows = given_rows
    values = values_of(format_named("cdc").encode(changes_of(schema, *rows)))
    assert values == [cdc_event(schema, _plain(row)) for row in rows]
    by_name = {one.name: one for one in schema.columns}
    for row, value in zip(rows, values, strict=True):
        for side in ("before", "after"):
            if row[side] is not None:
                back = {by_name[name].id: _text_of(by_name[name], item) for name, item in value[side].items()}
                assert back == dict(row[side])


def _text_of(one: Column, value: Any) -> str | None:
    if isinstance(value, bool):
        return "t" if value else "f"
    return str(value) if isinstance(value, int) else value


@given(tables(), st.booleans())
@examples(40)
def test_the_format_debezium_is_the_reference(
    given_rows: tuple[TableSchema, list[dict[str, Any]]], schemas: bool
) -> None:
    schema, rows = given_rows
    events = format_named("debezium", schemas=schemas, tombstones=False).encode(changes_of(schema, *rows))
    expected: dict[int, tuple[Any, Any]] = {}
    for index, row in enumerate(rows):
        try:
            expected[index] = debezium_images(schema, _plain(row), DebeziumSettings())
        except NotEncodable:
            assert index in events.refused
    payloads = [value["payload"] if schemas else value for value in values_of(events)]
    assert events.source.tolist() == sorted(expected)
    assert [(value["before"], value["after"]) for value in payloads] == [expected[index] for index in sorted(expected)]


@given(tables())
@examples(20)
def test_flat_rows_are_the_images_of_debezium(given_rows: tuple[TableSchema, list[dict[str, Any]]]) -> None:
    schema, rows = given_rows
    changes = changes_of(schema, *rows)
    flat = format_named("flat", tombstones=False).encode(changes)
    whole = format_named("debezium", tombstones=False).encode(changes)
    assert sorted(set(flat.refused) - set(whole.refused)) == [
        index for index, row in enumerate(rows) if row["op"] == "t" and index not in whole.refused
    ]
    images = {
        index: value["before"] if value["op"] == "d" else value["after"]
        for index, value in zip(whole.source.tolist(), values_of(whole), strict=True)
    }
    for index, value in zip(flat.source.tolist(), values_of(flat), strict=True):
        added = {name: value.pop(name) for name in ("__deleted", "__op", "__lsn", "__source_ts_ms")}
        assert value == images[index]
        assert added["__deleted"] == ("true" if rows[index]["op"] == "d" else "false")


@given(tables())
@examples(20)
def test_cloud_events_contain_the_format_cdc(given_rows: tuple[TableSchema, list[dict[str, Any]]]) -> None:
    schema, rows = given_rows
    changes = changes_of(schema, *rows)
    events = format_named("cloudevents").encode(changes)
    assert [value["data"] for value in values_of(events)] == values_of(format_named("cdc").encode(changes))
    assert [value["id"] for value in values_of(events)] == [f"LOG/0/16E9058/{number}" for number in range(len(rows))]
