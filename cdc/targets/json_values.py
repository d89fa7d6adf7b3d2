"""JSON values of columns in answers: the same for a value of a Delta table, and for its text in a search index.

Numbers are JSON numbers if JSON can hold every value of their type: integers and floats. Decimals, NaN, infinities,
times and bytes are text. A time is ISO 8601; all other text is what Postgres prints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, datetime
from decimal import Decimal
from functools import partial
from math import isfinite
from typing import Any, Final

from cdc.array_literal import element_type, parse_array
from cdc.table import Column

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


def conversion_of(column: Column) -> Callable[[str], Any]:
    """Return the conversion of a column's texts, as Postgres prints them, to the JSON values of a Delta table.

    A value that a Delta table cannot hold, such as `infinity` in a timestamp, stays text. So does any other text, and
    an array in a key, as in a Delta table.
    """
    oid, _ = column.value_type
    element = element_type(oid, column.type_name) if column.key is None else None
    if element is not None:
        return partial(_array_value, _PARSER_BY_OID.get(element, str))
    return partial(_scalar_value, _PARSER_BY_OID.get(oid, str))


def _scalar_value(parse: Callable[[str], Any], text: str) -> Any:
    try:
        return json_value(parse(text))
    except ValueError:
        return text


def _array_value(parse: Callable[[str], Any], text: str) -> Any:
    try:
        elements = parse_array(text)
    except ValueError:
        return text  # of several dimensions, or with other subscripts
    return [None if element is None else _scalar_value(parse, element) for element in elements]


def _boolean(text: str) -> bool:
    if text not in {"t", "f"}:
        raise ValueError("expected boolean text 't' or 'f'")
    return text == "t"


_PARSER_BY_OID: Final[Mapping[int, Callable[[str], Any]]] = {
    16: _boolean,
    20: int,
    21: int,
    23: int,
    26: int,
    700: float,
    701: float,
    1114: datetime.fromisoformat,
    1184: datetime.fromisoformat,
}
"""OID of a type (pg_type.dat) → parser of its texts; values of all other types are text in JSON."""
