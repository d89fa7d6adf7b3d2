"""Durations and sizes: parsing of text with a unit into seconds and bytes, and printing."""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
BYTES: Final = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_QUANTITY: Final = re.compile(r"(\d{1,15}(?:\.\d{1,6})?) ?([A-Za-z]{1,3})\Z", re.ASCII)


def seconds(value: Any) -> float:
    """Return the seconds of a duration such as `10s`, `100ms`, `5m`, `1h`, `7d` or 0; other numbers need a unit."""
    if str(value) == "0":
        return 0.0
    found = _read(value, SECONDS)
    if found is None:
        raise PydanticCustomError("duration", "expected a duration with its unit: 100ms, 10s, 5m, 1h or 7d")
    return found


def size(value: Any) -> int:
    """Return the bytes of a size such as `16MiB`, `10GB` or a number of bytes without unit."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    found = _read(value, BYTES)
    if found is None or found != int(found):
        raise PydanticCustomError("size", "expected a size: 16MiB, 10GB or a number of bytes")
    return int(found)


def _read(value: Any, units: dict[str, Any]) -> float | None:
    match = _QUANTITY.match(value) if isinstance(value, str) else None
    if match is None or match[2] not in units:
        return None
    return float(match[1]) * float(units[match[2]])


Seconds = Annotated[
    float,
    BeforeValidator(seconds),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^(0|\d+(\.\d+)? ?(ms|s|m|h|d))$", "maximum": 0}),
]
"""A duration in seconds, written with its unit."""


def _off(value: Any) -> Any:
    return 0 if value == "off" else value


SecondsOrOff = Annotated[
    Seconds,
    BeforeValidator(_off),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^(off|0|\d+(\.\d+)? ?(ms|s|m|h|d))$", "maximum": 0}),
]
"""A duration in seconds, or `off`, which is 0."""

Bytes = Annotated[
    int,
    BeforeValidator(size),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^\d+(\.\d+)? ?([kKMGT]i?B|B)?$", "minimum": 0}),
]
"""A size in bytes, written with its unit or as a number of bytes."""


def print_seconds(value: float) -> str:
    """Return the duration as text, in the largest unit that gives a whole number."""
    if not value:
        return "0"
    for unit in reversed(SECONDS):
        count = value / SECONDS[unit]
        if count >= 1 and count == int(count):
            return f"{int(count)}{unit}"
    return f"{value:g}s"


def print_size(value: int) -> str:
    """Return the size as text, in the largest binary unit that gives a whole number."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % BYTES[unit] == 0:
            return f"{value // BYTES[unit]}{unit}"
    return f"{value}B"
