"""Number formats of page and commands: short, with a unit, and a dash for unknown values."""

from __future__ import annotations

from typing import Final

UNKNOWN: Final = "–"
THIN_SPACE: Final = "\u202f"
"""Character between groups of three digits."""
_SIZES: Final = ("B", "kB", "MB", "GB", "TB", "PB")
_THOUSAND: Final = 1000
_MINUTE: Final = 60
_HOUR: Final = 3600
_DAY: Final = 86400


def duration_and_unit(value: float | None) -> tuple[str, str]:
    """Return a duration as number and unit, such as `0.42 s`, `12 s`, `3.5 min` or `2.0 h`."""
    if value is None:
        return UNKNOWN, ""
    if value < _MINUTE:
        return (f"{value:.2f}" if value < 10 else f"{value:.0f}"), "s"  # noqa: PLR2004 - two digits are enough
    for limit, size, unit in ((_HOUR, _MINUTE, "min"), (_DAY, _HOUR, "h")):
        if value < limit:
            return f"{value / size:.1f}", unit
    return f"{value / _DAY:.1f}", "d"


def size_and_unit(value: float | None) -> tuple[str, str]:
    """Return a number of bytes as number and unit; each unit is 1000 times the one before, such as kB and MB."""
    if value is None:
        return UNKNOWN, ""
    power = 0
    while value >= _THOUSAND and power < len(_SIZES) - 1:
        value, power = value / _THOUSAND, power + 1
    return (f"{value:.1f}" if power else f"{value:.0f}"), _SIZES[power]


def format_count(value: float | None) -> str:
    """Format a whole number with thin spaces between thousands."""
    return UNKNOWN if value is None else f"{value:,.0f}".replace(",", THIN_SPACE)


def format_rate(value: float | None) -> str:
    """Format a rate in rows per second."""
    if value is None:
        return UNKNOWN
    return f"{value:.1f}" if 0 < value < 10 else format_count(value)  # noqa: PLR2004 - below ten the fraction matters


def age_and_unit(value: float) -> tuple[str, str]:
    """Return an age as number and unit: whole seconds below a minute, otherwise minutes, hours or days."""
    return (f"{value:.0f}", "s") if round(value) < _MINUTE else duration_and_unit(value)


def format_duration(value: float | None) -> str:
    """Format a duration with its unit, such as `3.5 min`."""
    return _with_unit(duration_and_unit(value))


def format_size(value: float | None) -> str:
    """Format a number of bytes with its unit, such as `16.8 MB`."""
    return _with_unit(size_and_unit(value))


def format_age(value: float) -> str:
    """Format an age with its unit, such as `12 s`."""
    return _with_unit(age_and_unit(value))


def format_lag(bytes_behind: int | None, seconds_behind: float | None) -> str:
    """Format the distance between two positions in bytes of WAL and in time, as far as these are known."""
    wal = "another epoch" if bytes_behind is None else format_size(bytes_behind)
    return wal if seconds_behind is None else f"{wal}, {format_duration(seconds_behind)}"


def format_quantity(number: int, noun: str) -> str:
    """Format a number with its noun in singular or plural, such as `1 file` or `2 files`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _with_unit(pair: tuple[str, str]) -> str:
    return " ".join(part for part in pair if part)
