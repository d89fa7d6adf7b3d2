"""Interpolation of `${VAR}` and `${VAR:-default}` in the values of a definition; `$${` is a literal `${`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

from cdc.errors import ConfigError, UnsetVariable

_PLACE: Final = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_BODY: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?\Z", re.DOTALL)


class Interpolated(str):
    """Text after interpolation; `written` is the text before interpolation."""

    __slots__ = ("written",)
    written: str

    @classmethod
    def of(cls, text: str, written: str) -> Self:
        """Return the text after interpolation as an Interpolated; `written` is the text before interpolation."""
        made = cls(text)
        made.written = written
        return made


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """Return the text with its variables replaced, as an Interpolated; a text without variables is returned unchanged.

    An unset or empty variable is replaced by its default, as in a shell. Raises UnsetVariable if it has no default, and
    ConfigError for malformed syntax.
    """
    if "${" not in text:
        return text
    filled = _PLACE.sub(lambda match: _value(match, environment), text)
    return Interpolated.of(filled, text)


def _value(match: re.Match[str], environment: Mapping[str, str]) -> str:
    if match["body"] is None:
        return "${"
    body = _BODY.match(match["body"])
    if body is None or not match["end"]:
        raise ConfigError("malformed variable: expected ${NAME} or ${NAME:-default}, or $${ for a literal ${")
    value = environment.get(body["name"])
    if value:
        return value
    if body["default"] is not None:
        return body["default"]
    raise UnsetVariable(f"environment variable {body['name']!r} is {'not set' if value is None else 'empty'}")
