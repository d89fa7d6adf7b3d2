"""How page and commands print numbers: short, with a unit, and a dash for what is not known."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "–"
THIN: Final = "\u202f"
"""Between thousands."""
_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_THOUSAND: Final = 1000
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400


def seconds(value: float | None) -> tuple[str, str]:
    """A duration as (number, unit): `0.42 s`, `12 s`, `3.5 min`, `2.0 h`."""
    if value is None:
        return UNKNOWN, ""
    if value < _MINUTE:
        return (f"{value:.2f}" if value < 10 else f"{value:.0f}"), "s"  # noqa: PLR2004 - two digits are enough
    for limit, size, unit in ((_HOUR, _MINUTE, "min"), (_DAY, _HOUR, "h")):
        if value < limit:
            return f"{value / size:.1f}", unit
    return f"{value / _DAY:.1f}", "d"


def size(value: float | None) -> tuple[str, str]:
    """Bytes as (number, unit) in powers of 1000."""
    if value is None:
        return UNKNOWN, ""
    place = 0
    while value >= _THOUSAND and place < len(_SIZES) - 1:
        value, place = value / _THOUSAND, place + 1
    return (f"{value:.1f}" if place else f"{value:.0f}"), _SIZES[place]


def count(value: float | None) -> str:
    """A whole number with thin spaces between thousands."""
    return UNKNOWN if value is None else f"{value:,.0f}".replace(",", THIN)


def rate(value: float | None) -> str:
    """Rows per second."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if 0 < value < 10 else count(value)  # noqa: PLR2004 - below ten the fraction matters


def ago(value: float) -> tuple[str, str]:
    """An age as (number, unit): as a duration, whole seconds below a minute."""
    return (f"{value:.0f}", "s") if round(value) < _MINUTE else seconds(value)


def said(pair: tuple[str, str]) -> str:
    """A number with its unit, as one text."""
    return " ".join(part for part in pair if part)


def distance(size_behind: int | None, seconds_behind: float | None) -> str:
    """How far one position is from another: WAL and time, as far as they are known."""
    wal = "another epoch" if size_behind is None else said(size(size_behind))
    return wal if seconds_behind is None else f"{wal}, {said(seconds(seconds_behind))}"


def counted(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
