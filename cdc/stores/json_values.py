"""JSON values of columns in answers.

Numbers are JSON numbers if JSON can hold every value of their type: integers and floats. Decimals, NaN, infinities,
times and bytes are text. A time is ISO 8601; all other text is what Postgres prints.
"""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from math import isfinite
from typing import Any, Final

_SPECIAL: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""Text of a special float for Python → its text for Postgres."""


def json_value(value: Any) -> Any:
    """Return the JSON value of a value of a table, as Arrow's `to_pylist` returns it."""
    if type(value) in {list, tuple}:  # an interval is of a class that is derived from tuple
        return [json_value(element) for element in value]
    if isinstance(value, dict):
        return {name: json_value(member) for name, member in value.items()}
    return value if value is None or isinstance(value, bool | int | str) else _plain_value(value)


def _plain_value(value: Any) -> float | str:
    if isinstance(value, float):
        return value if isfinite(value) else _SPECIAL[str(value)]
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, date | datetime):
        return value.isoformat()
    if isinstance(value, Decimal):
        return format(value, "f")  # str prints a small one with an exponent, Postgres does not
    return str(value)
