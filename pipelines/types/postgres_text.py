"""Text of typed values: prints Arrow arrays exactly as Postgres does under the pinned session settings.

Arrow prints most values, column by column. Python prints the rest, value by value: floats that Postgres writes with an
exponent, decimals that Arrow writes with one, and dates outside the years 1 to 9999.

Postgres and Arrow disagree about the shortest text of some floats. Where a text is exactly between two floats, Arrow
and Python use it for the even one of both. Postgres does not use it: 1e23 is printed 9.999999999999999e+22
(src/common/d2s.c, `acceptBounds`). A text of at most 17 digits (of a real: 9) can be between two floats only if they
are at least 2^53 (2^22).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import date, timedelta
from decimal import Decimal
from fractions import Fraction
from math import frexp
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_MICROSECONDS: Final = pa.timestamp("us")
_DAY: Final = 86_400_000_000
_CYCLE: Final = 146_097
"""Days of 400 years, after which the calendar repeats."""
_USUAL_DAYS: Final = (-719_162, 2_932_896)
"""0001-01-01 and 9999-12-31 in days since 1970."""
_POSTGRES_DAYS: Final = (-2_440_588, 2_145_042_905)
"""The first day of Postgres, 4714-11-24 BC, and its last one, 5874897-12-31, in days since 1970."""
_USUAL_FROM: Final = 1e-4
_USUAL_TO: Final = {32: 1e6, 64: 1e10}
"""Bits of a float → the number from which Arrow or Postgres may write an exponent."""
_FIXED: Final = {32: 6, 64: 15}
"""Bits of a float → the decimal exponent from which Postgres writes it (`float4out` and `float8out`)."""
_FIRST_FIXED: Final = -4
_MANTISSA: Final = {32: 24, 64: 53}
_BETWEEN: Final = {32: 2.0**22, 64: 2.0**53}
"""Bits of a float → the number from which a shortest text may be exactly between two floats."""
_SPECIAL: Final = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
_QUOTED: Final = r'\A\z|(?i)\Anull\z|[{},"\\\s\x0b]'
"""Pattern of array elements that Postgres quotes: empty texts, the word NULL, and texts with special characters."""


def to_postgres_text(values: pa.Array) -> pa.Array:
    """Print typed values as Postgres does under the pinned session settings; null stays null.

    Raises pyarrow.ArrowInvalid if Postgres does not have a value: text with the character U+0000 or that is not UTF-8,
    or a date before 4714-11-24 BC.
    """
    for is_of_type, to_text in _TEXT_OF:
        if is_of_type(values.type):
            return to_text(values)
    return values.cast(pa.string())


def _texts(values: pa.Array) -> pa.Array:
    values.validate(full=True)
    if pc.any(pc.match_substring(values, "\0")).as_py():
        raise pa.ArrowInvalid("expected text without the character U+0000")
    return values


def _booleans(values: pa.Array) -> pa.Array:
    return pc.if_else(values, "t", "f")


def _decimals(values: pa.Array) -> pa.Array:
    texts = values.cast(pa.string())
    # Arrow prints 1E-10, Postgres never does
    return _each(texts, pc.match_substring(texts, "E"), lambda text: format(Decimal(text), "f"))


def _binaries(values: pa.Array) -> pa.Array:
    if not len(values):
        return values.cast(pa.large_string() if pa.types.is_large_binary(values.type) else pa.string())
    plain = values.cast(pa.large_binary())
    _, offsets, content = plain.buffers()
    starts = np.frombuffer(offsets, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    digits = memoryview(content or b"")[int(starts[0]) : int(starts[-1])].hex().encode()
    ends = pa.py_buffer(np.ascontiguousarray((starts - starts[0]) * 2))
    printed = pa.LargeStringArray.from_buffers(len(values), ends, pa.py_buffer(digits))
    texts = pc.binary_join_element_wise(_large("\\x"), printed, _large(""))
    texts = pc.if_else(values.is_valid(), texts, None) if values.null_count else texts
    return texts if pa.types.is_large_binary(values.type) else texts.cast(pa.string())


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _dates(values: pa.Array) -> pa.Array:
    days = values.cast(pa.date32()).cast(pa.int32())
    _check_range(days, *_POSTGRES_DAYS)
    is_unusual = _is_outside(days, *_USUAL_DAYS)
    texts = pc.if_else(is_unusual, pa.scalar(0, pa.int32()), days).cast(pa.date32()).cast(pa.string())
    return _replaced(texts, is_unusual, [f"{day}{era}" for day, era in map(_printed_day, _chosen(days, is_unusual))])


def _timestamps(values: pa.Array) -> pa.Array:
    micros = values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())
    first, last = (days * _DAY for days in _USUAL_DAYS)
    _check_range(micros, _POSTGRES_DAYS[0] * _DAY, np.iinfo(np.int64).max)
    zone = "+00" if values.type.tz else ""
    is_unusual = _is_outside(micros, first, last + _DAY - 1)
    usual = pc.if_else(is_unusual, 0, micros)
    texts = pc.binary_join_element_wise(_clock_texts(usual), zone, "") if zone else _clock_texts(usual)
    return _replaced(texts, is_unusual, [_printed_moment(one, zone) for one in _chosen(micros, is_unusual)])


def _clock_texts(micros: pa.Array) -> pa.Array:
    """Return timestamps as Postgres prints them: without zeros at the end of the fraction."""
    texts = micros.cast(_MICROSECONDS).cast(pa.string())
    return pc.ascii_rtrim(pc.ascii_rtrim(texts, "0"), ".")


def _printed_day(days: int) -> tuple[str, str]:
    """Return the date, and ` BC` or nothing; days: since 1970, in any year."""
    cycles, rest = divmod(days, _CYCLE)
    day = date(1970, 1, 1) + timedelta(rest)
    year = day.year + 400 * cycles
    return f"{year if year > 0 else 1 - year:04}{day:-%m-%d}", "" if year > 0 else " BC"


def _printed_moment(micros: int, zone: str) -> str:
    days, rest = divmod(micros, _DAY)
    day, era = _printed_day(days)
    (clock,) = _clock_texts(pa.array([rest])).to_pylist()
    return f"{day}{clock[len('1970-01-01') :]}{zone}{era}"


def _is_outside(values: pa.Array, first: int, last: int) -> pa.Array:
    return pc.or_(pc.less(values, first), pc.greater(values, last))


def _check_range(values: pa.Array, first: int, last: int) -> None:
    if pc.any(_is_outside(values, first, last)).as_py():
        raise pa.ArrowInvalid("expected a date from 4714-11-24 BC to 5874897-12-31")


def _floats(values: pa.Array) -> pa.Array:
    bits = values.type.bit_width
    texts = values.cast(pa.string())
    sizes = pc.abs(values)
    is_usual = pc.and_(pc.greater_equal(sizes, _USUAL_FROM), pc.less(sizes, _USUAL_TO[bits]))
    is_unusual = pc.invert(pc.or_(is_usual, pc.equal(sizes, 0)))
    pairs = zip(_chosen(texts, is_unusual), _chosen(values, is_unusual), strict=True)
    return _replaced(texts, is_unusual, [_SPECIAL.get(text) or _float(text, number, bits) for text, number in pairs])


def _float(text: str, number: float, bits: int) -> str:
    """Return a finite float as Postgres writes it; text: its shortest text for Arrow."""
    shortest = Decimal(text) if abs(number) < _BETWEEN[bits] else _nearest(text, number, bits)
    exponent = shortest.adjusted()
    if _FIRST_FIXED <= exponent < _FIXED[bits]:
        return format(shortest, "f")
    sign, digits, _ = shortest.normalize().as_tuple()
    first, *rest = map(str, digits)
    return f"{'-' if sign else ''}{first}{'.' if rest else ''}{''.join(rest)}e{exponent:+03}"


def _nearest(text: str, number: float, bits: int) -> Decimal:
    """Return the shortest decimal that is nearer to the float than to any other float, so not between two of them."""
    shortest = Decimal(text)
    exact = Fraction(abs(number))
    # the float below a power of two is nearer, but no power of two has a text between two floats
    half = Fraction(2) ** (frexp(exact)[1] - _MANTISSA[bits] - 1)
    low, high = exact - half, exact + half
    if low < abs(Fraction(shortest)) < high:
        return shortest
    exponent = int(shortest.normalize().as_tuple().exponent)
    while True:
        scaled = exact / Fraction(10) ** exponent
        inside = [one for one in (int(scaled), int(scaled) + 1) if low < one * Fraction(10) ** exponent < high]
        if inside:
            best = min(inside, key=lambda one: (abs(one - scaled), one % 2))
            return Decimal(best if number > 0 else -best).scaleb(exponent)
        exponent -= 1


def _lists(values: pa.Array) -> pa.Array:
    """Return lists as array literals."""
    texts = to_postgres_text(values.flatten())
    escaped = pc.replace_substring_regex(texts, r'(["\\])', r"\\\1")
    quoted = pc.binary_join_element_wise('"', escaped, '"', "")
    spelled = pc.fill_null(pc.if_else(pc.match_substring_regex(texts, _QUOTED), quoted, texts), "NULL")
    lengths = pc.fill_null(pc.list_value_length(values), 0)
    ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
    joined = pc.binary_join(pa.ListArray.from_arrays(ends, spelled), ",")
    literals = pc.binary_join_element_wise("{", joined, "}", "")
    return pc.if_else(values.is_valid(), literals, None)


def _each(texts: pa.Array, mask: pa.Array, convert: Callable[[str], str]) -> pa.Array:
    """Convert the texts under a mask with a function of Python; null in the mask is False."""
    return _replaced(texts, mask, [convert(text) for text in _chosen(texts, mask)])


def _chosen(values: pa.Array, mask: pa.Array) -> list[Any]:
    return values.filter(mask).to_pylist() if pc.any(mask).as_py() else []


def _replaced(texts: pa.Array, mask: pa.Array, replacements: list[str]) -> pa.Array:
    """Return the texts with others in place of those under the mask, in order; null in the mask is False."""
    if not replacements:
        return texts
    return pc.replace_with_mask(texts, pc.fill_null(mask, False), pa.array(replacements, texts.type))


_TEXT_OF: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...]] = (
    (pa.types.is_boolean, _booleans),
    (pa.types.is_floating, _floats),
    (pa.types.is_decimal, _decimals),
    (pa.types.is_date, _dates),
    (pa.types.is_timestamp, _timestamps),
    (pa.types.is_binary, _binaries),
    (pa.types.is_large_binary, _binaries),
    (pa.types.is_string, _texts),
    (pa.types.is_large_string, _texts),
    (pa.types.is_list, _lists),
)
