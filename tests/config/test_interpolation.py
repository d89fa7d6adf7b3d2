"""Interpolation: a variable, its default, and the literal `${`."""

from __future__ import annotations

import pytest

from cdc.config.interpolation import Interpolated, interpolate
from cdc.errors import ConfigError, UnsetVariable


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("plain $HOME", "plain $HOME"),
        ("${A}/x", "1/x"),
        ("${NONE:-two}", "two"),
        ("${EMPTY:-two}", "two"),
        ("$${A}", "${A}"),
        ("${NONE:-}", ""),
    ],
)
def test_a_variable_is_replaced_by_its_value_or_its_default(text: str, value: str) -> None:
    assert interpolate(text, {"A": "1", "EMPTY": ""}) == value


def test_the_text_before_interpolation_is_available() -> None:
    found = interpolate("${A}", {"A": "1"})

    assert isinstance(found, Interpolated)
    assert found.written == "${A}"
    assert not isinstance(interpolate("1", {}), Interpolated)


@pytest.mark.parametrize("text", ["${", "${1}", "${A:default}", "${A"])
def test_malformed_syntax_is_an_error(text: str) -> None:
    with pytest.raises(ConfigError, match="malformed variable"):
        interpolate(text, {"A": "1"})


@pytest.mark.parametrize(("environment", "state"), [({}, "not set"), ({"A": ""}, "empty")])
def test_a_variable_without_value_and_default_is_an_error(environment: dict[str, str], state: str) -> None:
    with pytest.raises(UnsetVariable, match=f"variable 'A' is {state}"):
        interpolate("${A}", environment)
