"""The types of values in a condition, and how the text of Postgres becomes a value of each.

A column has the type that it has in a Spark table of the sinks. Two differ: `numeric` without a modifier, which Spark
stores as text, is an exact number, and `char(n)` is compared without regard to the spaces at its end.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum, auto
from typing import Any, Final

import numpy as np

from cdc.table import Column

Value = Any
"""bool, int, Decimal, float, str, date or datetime; None is NULL."""


class TypeKind(Enum):
    """Kinds of types; values of one kind can be compared."""

    BOOLEAN = auto()
    #: Integers and decimals.
    EXACT = auto()
    #: Floating-point numbers.
    APPROXIMATE = auto()
    TEXT = auto()
    #: Texts of one length, filled with spaces.
    PADDED = auto()
    DATE = auto()
    #: Times with time zone.
    TIMESTAMP = auto()
    #: Times without time zone.
    LOCAL_TIMESTAMP = auto()
    #: NULL, which every type has.
    NULL = auto()
    #: Values that a condition can only compare with NULL.
    OTHER = auto()


@dataclass(frozen=True, slots=True)
class ConditionType:
    """A type. An exact number without a precision may have any number of digits."""

    kind: TypeKind
    name: str
    precision: int | None = None
    scale: int = 0
    bits: int | None = None
    """Size of an integer, of which arithmetic has the result type."""


BOOLEAN: Final = ConditionType(TypeKind.BOOLEAN, "boolean")
SMALLINT: Final = ConditionType(TypeKind.EXACT, "smallint", 5, bits=16)
INT: Final = ConditionType(TypeKind.EXACT, "int", 10, bits=32)
BIGINT: Final = ConditionType(TypeKind.EXACT, "bigint", 20, bits=64)
NUMERIC: Final = ConditionType(TypeKind.EXACT, "numeric")
FLOAT: Final = ConditionType(TypeKind.APPROXIMATE, "float")
DOUBLE: Final = ConditionType(TypeKind.APPROXIMATE, "double")
TEXT: Final = ConditionType(TypeKind.TEXT, "text")
DATE: Final = ConditionType(TypeKind.DATE, "date")
TIMESTAMP: Final = ConditionType(TypeKind.TIMESTAMP, "timestamp")
LOCAL_TIMESTAMP: Final = ConditionType(TypeKind.LOCAL_TIMESTAMP, "timestamp_ntz")
NULL: Final = ConditionType(TypeKind.NULL, "null")
OTHER: Final = ConditionType(TypeKind.OTHER, "other")

MOST_DIGITS: Final = 38
_BY_OID: Final[Mapping[int, ConditionType]] = {
    16: BOOLEAN,
    20: BIGINT,
    21: SMALLINT,
    23: INT,
    26: BIGINT,
    700: FLOAT,
    701: DOUBLE,
    1082: DATE,
    1114: LOCAL_TIMESTAMP,
    1184: TIMESTAMP,
}
_NUMERIC: Final = 1700
_CHAR: Final = 1042
_BYTEA: Final = 17
_HEADER: Final = 4
"""Bytes of the length word, which a type modifier counts."""
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")
_TIME: Final = re.compile(r"\d{4}-\d{2}-\d{2}(?:[ T]\d{2}:\d{2}:\d{2}(?:\.\d{1,6})?)?")
_ZONE: Final = re.compile(r"(?:Z|[+-]\d{2}(?::?\d{2})?)\Z")


def decimal_type(precision: int, scale: int) -> ConditionType:
    """Return the type of decimals."""
    return ConditionType(TypeKind.EXACT, f"decimal({precision},{scale})", precision, scale)


def type_of(column: Column) -> ConditionType:
    """Return the type of a column."""
    oid, modifier = column.value_type
    if oid in _BY_OID:
        return _BY_OID[oid]
    if oid == _NUMERIC:
        precision, scale = ((modifier - _HEADER) >> 16) & 0xFFFF, (modifier - _HEADER) & 0x7FF
        is_decimal = modifier >= _HEADER and precision <= MOST_DIGITS and scale <= precision
        return decimal_type(precision, scale) if is_decimal else NUMERIC
    if oid == _CHAR and modifier >= _HEADER:
        length = modifier - _HEADER
        return ConditionType(TypeKind.PADDED, f"char({length})", precision=length)
    if oid == _BYTEA or column.type_name.endswith("[]"):
        return OTHER
    return TEXT


def reader_of(value_type: ConditionType) -> Callable[[str], Value]:
    """Return a function that makes a value of the text of Postgres; it raises ValueError for a value that the type does
    not have, such as infinity in a date.
    """
    return _READERS[value_type.kind] if value_type is not FLOAT else lambda text: float(np.float32(text))


def literal_of(text: str, value_type: ConditionType) -> Value:
    """Return a text in the condition as a value of a date or time; raises ValueError if it has another form."""
    if value_type.kind is TypeKind.DATE:
        if not _DATE.fullmatch(text):
            raise ValueError("expected YYYY-MM-DD")
        return date.fromisoformat(text)
    zone = _ZONE.search(text) if ":" in text else None
    if not _TIME.fullmatch(text.removesuffix(zone[0]) if zone else text) or (
        zone and value_type.kind is TypeKind.LOCAL_TIMESTAMP
    ):
        raise ValueError("expected YYYY-MM-DD HH:MM:SS")
    found = datetime.fromisoformat(text)
    if value_type.kind is TypeKind.LOCAL_TIMESTAMP:
        return found
    return found.replace(tzinfo=UTC) if zone is None else found.astimezone(UTC)


def _exact(text: str) -> Value:
    found = Decimal(text)
    if not found.is_finite():
        raise ValueError("no number")
    return found


_READERS: Final[Mapping[TypeKind, Callable[[str], Value]]] = {
    TypeKind.BOOLEAN: lambda text: text == "t",
    TypeKind.EXACT: _exact,
    TypeKind.APPROXIMATE: float,
    TypeKind.TEXT: str,
    TypeKind.PADDED: str,
    TypeKind.DATE: date.fromisoformat,
    TypeKind.TIMESTAMP: datetime.fromisoformat,
    TypeKind.LOCAL_TIMESTAMP: datetime.fromisoformat,
    TypeKind.OTHER: str,
}
