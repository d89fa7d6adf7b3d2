"""What a consumer with Kafka's JSON converter reads: values that are checked against the schema of their event."""

from __future__ import annotations

from base64 import b64decode
from decimal import Context, Decimal
from typing import Any

RANGES = {"int16": 15, "int32": 31, "int64": 63}
EXACT = Context(prec=150_000)
SPECIAL = {"NaN", "Infinity", "-Infinity"}


def connect_value(value: Any, schema: dict[str, Any], place: str = "") -> Any:
    """The value that the converter returns; raises AssertionError if it does not fit the schema."""
    kind = schema["type"]
    if value is None:
        assert schema["optional"], f"{place} is null, but required"
        return None
    if kind == "struct":
        names = [field["field"] for field in schema["fields"]]
        assert list(value) == names, place
        found = {
            field["field"]: connect_value(value[field["field"]], field, f"{place}.{field['field']}")
            for field in schema["fields"]
        }
        if schema.get("name") == "io.debezium.data.VariableScaleDecimal":
            return _decimal(found["value"], found["scale"])
        return found
    if kind == "array":
        assert isinstance(value, list), place
        return [connect_value(one, schema["items"], f"{place}[]") for one in value]
    if kind == "map":
        pairs = value.items() if isinstance(value, dict) else value
        keys, items = schema["keys"], schema["values"]
        assert isinstance(value, dict) == (keys["type"] == "string"), place
        return {connect_value(key, keys, place): connect_value(one, items, place) for key, one in pairs}
    return _scalar(value, schema, place)


def _scalar(value: Any, schema: dict[str, Any], place: str) -> Any:
    kind = schema["type"]
    if kind == "boolean":
        assert isinstance(value, bool), place
        return value
    if kind == "string":
        assert isinstance(value, str), place
        return value
    if kind == "bytes":
        content = b64decode(value, validate=True)
        if schema.get("name") == "org.apache.kafka.connect.data.Decimal":
            return _decimal(content, int(schema["parameters"]["scale"]))
        return content
    if kind in RANGES:
        limit = 1 << RANGES[kind]
        assert type(value) is int, place
        assert -limit <= value < limit, place
        return value
    assert kind in {"float", "double"}, place
    assert type(value) in {int, float} or value in SPECIAL, place
    return float(value)


def _decimal(content: bytes, scale: int) -> Decimal:
    return Decimal(int.from_bytes(content, "big", signed=True)).scaleb(-scale, EXACT)
