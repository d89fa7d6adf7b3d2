"""Interpolation of `${VAR}` and `${VAR:-default}` in the values of a definition; `$${` is a literal `${`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

from cdc.errors import ConfigError, UnsetVariable

_PLACE: Final = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_BODY: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?\Z", re.DOTALL)


class Interpolated(str):
    """Text after interpolation; `written` is the text before it."""

    __slots__ = ("written",)
    written: str

    @classmethod
    def of(cls, text: str, written: str) -> Self:
        """The text after interpolation, with the text before it."""
        made = cls(text)
        made.written = written
        return made


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """The text with its variables replaced: Interpolated if it contains one, otherwise the same text.

    A variable that is unset or empty is replaced by its default, as in a shell. Raises UnsetVariable if it has no
    default, ConfigError for malformed syntax.
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
