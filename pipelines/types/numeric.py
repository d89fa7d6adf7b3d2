"""numeric: decimal where the declaration fits one, else text.

Without a declared precision, with one above 38, or with a scale below 0 or above the precision
there is no decimal type that holds every value. NaN has no decimal and is refused.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from pipelines.types.family import Family, cast_family

NUMERIC_OID: Final = 1700
MAX_PRECISION: Final = 38
"""Of Delta and Spark decimals; Postgres goes to 1,000."""

_HEADER: Final = 4  # VARHDRSZ: src/include/utils/numeric.h packs a modifier above it
_SCALE_BITS: Final = 11


def declared(typmod: int) -> tuple[int, int] | None:
    """(precision, scale) of a numeric's modifier, None when it has none."""
    if typmod < _HEADER:
        return None
    packed = typmod - _HEADER
    half = 1 << (_SCALE_BITS - 1)
    return packed >> 16 & 0xFFFF, (packed & ((1 << _SCALE_BITS) - 1) ^ half) - half


def modifier(precision: int, scale: int) -> int:
    """The modifier that declares them."""
    return (precision << 16 | scale & ((1 << _SCALE_BITS) - 1)) + _HEADER


def numeric_family(typmod: int) -> Family | None:
    """The decimal for numeric(p,s), None where only text is exact."""
    shape = declared(typmod)
    if shape is None:
        return None
    precision, scale = shape
    if precision > MAX_PRECISION or not 0 <= scale <= precision:
        return None
    return cast_family(f"numeric({precision},{scale})", pa.decimal128(precision, scale))
