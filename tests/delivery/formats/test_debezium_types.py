"""Values of every type as Debezium writes them: expected schemas and values are in data/debezium_types.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cdc.config.deliveries import DebeziumSettings
from cdc.delivery.formats.debezium_types import column_encoding
from cdc.errors import EventNotEncodable
from tests.delivery.formats.changes import (
    ID,
    changes_of,
    column,
    format_named,
    log_row,
    one_value,
    schema_with,
    values_of,
)

CASES = json.loads((Path(__file__).parent / "data/debezium_types.json").read_text())


def _schema_of(case: dict[str, Any]) -> Any:
    return schema_with(
        ID,
        column(
            "value",
            case["oid"],
            case["type"],
            typmod=case["typmod"],
            labels=tuple(case.get("labels", ())),
            type_kind=case.get("kind", "b"),
        ),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']} {case['text'][:30]}")
def test_a_value_is_that_of_debezium(case: dict[str, Any]) -> None:
    events = one_value(_schema_of(case), case["text"], case.get("settings", {}))
    if case["value"] is None:
        assert list(events.refused) == [0]
        return
    event = values_of(events)[0]
    fields = event["schema"]["fields"][1]["fields"]
    assert fields[1] == {**case["schema"], "field": "value"}
    value = event["payload"]["after"]["value"]
    assert value == case["value"]
    assert type(value) is type(case["value"]) or isinstance(value, int)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['type']} {case['text'][:30]}")
def test_null_is_null_and_the_placeholders_fit_the_type(case: dict[str, Any]) -> None:
    schema = _schema_of(case)
    events = one_value(schema, None, case.get("settings", {}))
    assert values_of(events)[0]["payload"]["after"] == {"id": 1, "value": None}
    encoding = column_encoding(schema.columns[1], DebeziumSettings(**case.get("settings", {})))
    for text in (encoding.fallback, encoding.unavailable):
        if text is not None:
            assert _fits(json.loads(text), case["schema"])


KINDS: dict[str, tuple[type, ...]] = {
    "boolean": (bool,), "string": (str,), "bytes": (str,), "array": (list,), "map": (dict, list), "struct": (dict,),
    "float": (int, float), "double": (int, float), "int16": (int,), "int32": (int,), "int64": (int,),
}  # fmt: skip


def _fits(value: Any, schema: dict[str, Any]) -> bool:
    if not isinstance(value, KINDS[schema["type"]]):
        return False
    if isinstance(value, dict) and schema["type"] == "struct":
        return list(value) == [field["field"] for field in schema["fields"]]
    return not isinstance(value, list) or "items" not in schema or all(_fits(item, schema["items"]) for item in value)


def test_a_refused_value_is_not_in_the_message() -> None:
    schema = schema_with(ID, column("price", 1700, "numeric"))
    rows = [log_row("c", i, key=[str(i)], after={1: str(i), 2: text}) for i, text in enumerate(("1.5", "NaN", "2"))]
    events = format_named("debezium").encode(changes_of(schema, *rows))
    assert events.source.tolist() == [0, 2]
    assert isinstance(events.refused[1], EventNotEncodable)
    assert str(events.refused[1]) == (
        "column 'price' of table shop.orders cannot be sent: Debezium has no value of type numeric for it"
    )


@pytest.mark.parametrize(
    ("oid", "type_name", "default", "expected"),
    [
        (23, "integer", "nextval('orders_id_seq'::regclass)", 0),
        (23, "integer", "'-1'::integer", -1),
        (25, "text", "'it''s'::text", "it's"),
        (16, "boolean", "true", True),
        (1184, "timestamp with time zone", "now()", "1970-01-01T00:00:00Z"),
        (3802, "jsonb", "'{}'::jsonb", "{}"),
        (2950, "uuid", "gen_random_uuid()", "00000000-0000-0000-0000-000000000000"),
        (25, "text", "(('a'::text || 'b'::text))", None),
        (25, "text", "NULL::character varying", None),
        (1700, "numeric", "0", None),
    ],
)
def test_a_default_is_part_of_the_schema(oid: int, type_name: str, default: str, expected: Any) -> None:
    events = one_value(schema_with(ID, column("value", oid, type_name, default=default)), None)
    event = values_of(events)[0]
    assert event["schema"]["fields"][1]["fields"][1].get("default") == expected
    assert event["payload"]["after"]["value"] is None
