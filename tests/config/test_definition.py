"""The JSON schema of definitions: what editors complete by, shipped as a file so that a change is seen."""

import json
from pathlib import Path
from typing import Any

from cdc.config import Definition

GOLDEN = Path(__file__).parents[2] / "config" / "cdc.schema.json"


def described(node: Any, name: str = "") -> list[str]:
    """Keys without a description, by dotted name; parts with a schema of their own have it there."""
    found = []
    for key, child in node.get("properties", {}).items():
        if not child.get("description") and "$ref" not in child and "const" not in child and "items" not in child:
            found.append(f"{name}.{key}")
    return found


def test_the_shipped_schema_is_the_one_of_the_models() -> None:
    shipped = json.loads(GOLDEN.read_text(encoding="utf-8"))
    shipped.pop("$schema")
    assert shipped == Definition.model_json_schema(), "run: cdc config schema -o config/cdc.schema.json"


def test_every_key_is_described_and_no_part_takes_unknown_keys() -> None:
    schema = Definition.model_json_schema()
    parts = {"": schema, **schema["$defs"]}
    assert [key for name, part in parts.items() for key in described(part, name)] == []
    objects = [part for part in schema["$defs"].values() if part["type"] == "object"]
    assert all(part["additionalProperties"] is False for part in objects)
