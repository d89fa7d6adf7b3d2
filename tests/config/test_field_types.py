"""Field types of a definition: what each accepts, and the message for what it rejects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cdc.config.field_types import (
    Glob,
    Location,
    Share,
    Switch,
    Whole,
    fixed_part,
    is_remote,
    placeholders,
    sibling_path,
)
from cdc.config.interpolation import Interpolated


@pytest.mark.parametrize(
    ("kind", "value", "parsed"),
    [
        (Whole, Interpolated.of("5", "${N}"), 5),
        (Share, Interpolated.of("0.5", "${N}"), 0.5),
        (Switch, Interpolated.of("true", "${N}"), True),
        (Glob, "shop.*", "shop.*"),
    ],
)
def test_text_of_a_variable_is_parsed_as_the_type_of_the_key(kind: Any, value: Any, parsed: object) -> None:
    assert TypeAdapter(kind).validate_python(value) == parsed


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (Whole, "5", "expected a whole number"),
        (Whole, True, "expected a whole number"),
        (Share, "half", "expected a number"),
        (Switch, "yes", "expected true or false"),
        (Glob, "orders", "expected a glob over schema.table"),
        (Location, "ftp://host/x", "expected a local path or one of s3://"),
        (Location, " ", "expected a path"),
    ],
)
def test_another_value_is_rejected(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(kind).validate_python(value)


def test_a_local_path_is_relative_to_the_directory_of_the_definition() -> None:
    location = TypeAdapter(Location)
    assert location.validate_python("../log", context={"directory": Path("/etc/cdc")}) == "/etc/log"
    assert location.validate_python("s3://bucket/log/") == "s3://bucket/log"


def test_parts_of_a_path() -> None:
    assert placeholders("/lake/{schema}/{table}") == ["schema", "table"]
    assert fixed_part("/lake/x_{schema}/{table}") == "/lake"
    assert sibling_path("/data/log", "catalog.db") == "/data/catalog.db"
    assert (is_remote("s3://b/x"), is_remote("file:///x"), is_remote("/x")) == (True, False, False)
