"""`${VAR}` and `${VAR:-default}` in the values of a definition; `$${` stands for a plain `${`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Self

from cdc.errors import ConfigError, UnsetVariable

_PLACE: Final = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_BODY: Final = re.compile(r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>.*))?\Z", re.DOTALL)


class Interpolated(str):
    """Text that holds the values of variables; `written` is what the definition says."""

    __slots__ = ("written",)
    written: str

    @classmethod
    def of(cls, text: str, written: str) -> Self:
        """The text together with what was written."""
        made = cls(text)
        made.written = written
        return made


def interpolate(text: str, environment: Mapping[str, str]) -> str:
    """The text with its variables filled in: Interpolated if there was one, the same text otherwise.

    A variable that is unset or empty takes its default, as in a shell; without a default it raises
    UnsetVariable. A place that is not written as `${NAME}` or `${NAME:-default}` raises ConfigError.
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
        raise ConfigError("malformed variable: expected ${NAME} or ${NAME:-default}, or $${ for a plain ${")
    value = environment.get(body["name"])
    if value:
        return value
    if body["default"] is not None:
        return body["default"]
    raise UnsetVariable(f"variable {body['name']!r} is {'not set' if value is None else 'empty'}")
