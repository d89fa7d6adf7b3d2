"""Families: groups of Postgres types that become the same Arrow type; `family_of` chooses the family of a column.

A family converts an array of texts to an array of its Arrow type. The texts are values as Postgres prints them under
the pinned session settings. The family changes no value: a text that the type cannot represent exactly is an error.
README.md has the complete table of types.

- A numeric column is text if it declares no precision, or a precision or scale that no Delta decimal has. A column of
  a type without a family is text too.
- The text of a real is parsed to 32 bits. Parsing it to 64 bits first would round it twice.
- Dates and timestamps have years 1 to 9999. `infinity`, years BC and later years are refused, because neither Delta nor
  its readers have them.
- `time`, `timetz` and `interval` are text: Delta stores neither `24:00:00` nor months of unknown length.
- An array becomes a list of its elements, with its NULL elements. Its type declares neither the number of dimensions
  nor the first subscript. So `{{1},{2}}` and `[0:1]={1,2}` are refused: a list cannot represent them. Section 8.15.6 of
  the Postgres manual says how elements are quoted.

`widening` converts an array to another type that represents every value of the first type exactly. The other type is a
wider number of the same kind, or text as Postgres prints it. Text is not converted to other types, because a value may
not fit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.array_literal import ELEMENT_BY_OID, element_type, parse_array
from cdc.table import Column
from pipelines.types.postgres_text import to_postgres_text


class TypePolicy(StrEnum):
    """How a sink converts the text of a value that Postgres sent."""

    #: Convert to the nearest type that represents every value exactly; a value that it cannot represent is an error.
    EXACT = "exact"
    #: Make every column a string, exactly as sent.
    TEXT = "text"
    #: As EXACT, but a value that the type cannot represent becomes null, except in a key or an array.
    NULLED = "null"
    #: As EXACT, but a column whose type cannot represent every value of Postgres is a string.
    LOSSLESS = "lossless"

    def of(self, column: str) -> TypePolicy:
        """Return this policy, which applies to every column; so callers can use it in place of a ColumnPolicies."""
        del column
        return self


@dataclass(frozen=True, slots=True)
class ColumnPolicies:
    """The type policy of a table, with exceptions for single columns. Executors receive a pickled instance."""

    table: TypePolicy
    columns: tuple[tuple[str, TypePolicy], ...] = ()
    """Pairs (column name at the source, policy of this column)."""

    def of(self, column: str) -> TypePolicy:
        """Return the policy of one column; column: its name at the source."""
        return dict(self.columns).get(column, self.table)


Policy = TypePolicy | ColumnPolicies
"""The type policies of a table: one for all columns, or with exceptions for single columns."""


@dataclass(frozen=True, slots=True)
class Family:
    """An Arrow type of target columns, and the conversion of Postgres text to this type.

    `convert` takes an array of strings, with null for SQL NULL. It returns an array of type `arrow` with the same
    length and with nulls at the same indexes. It raises pyarrow.ArrowInvalid if it cannot represent a value exactly.
    """

    name: str
    arrow: pa.DataType
    convert: Callable[[pa.Array], pa.Array]
    is_total: bool = True
    """Whether the type represents every value that Postgres can send."""

    def with_nulls(self) -> Family:
        """Return a family that converts a value which the type cannot represent to null."""
        return Family(f"{self.name} or null", self.arrow, lambda texts: _convert_or_null(self.convert, texts))


def _convert_or_null(convert: Callable[[pa.Array], pa.Array], texts: pa.Array) -> pa.Array:
    try:
        return convert(texts)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return convert(pa.nulls(1, pa.string()))
    middle = len(texts) // 2
    halves = (texts.slice(0, middle), texts.slice(middle))
    return pa.concat_arrays([_convert_or_null(convert, half) for half in halves])


def cast_family(name: str, arrow: pa.DataType, *, is_total: bool = True) -> Family:
    """Return a family that converts texts with Arrow's cast, which fails on an invalid text.

    Use it only for types to which this cast loses nothing.
    """
    return Family(name, arrow, lambda texts: texts.cast(arrow), is_total)


TEXT_OID: Final = 25
TEXT_ARRAY_OID: Final = 1009
NUMERIC_OID: Final = 1700
TEXT: Final = Family("text", pa.string(), lambda texts: texts.cast(pa.string()))


def _convert_boolean(texts: pa.Array) -> pa.Array:
    is_true = pc.equal(texts, "t")
    is_known = pc.or_(is_true, pc.equal(texts, "f"))
    if pc.all(is_known, min_count=0).as_py() is False:
        raise pa.ArrowInvalid("expected boolean text 't' or 'f'")
    return is_true


_BYTEA_PREFIX: Final = np.frombuffer(b"\\x", dtype=np.uint8)
_NOT_A_DIGIT: Final = 255


def _digit_values() -> np.ndarray:
    """Return a table of 256 entries: the value of each byte as a hexadecimal digit."""
    table = np.full(256, _NOT_A_DIGIT, dtype=np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        table[digit] = value
    return table


_DIGIT_VALUES: Final = _digit_values()


def _convert_bytea(texts: pa.Array) -> pa.Array:
    r"""Convert bytea texts to bytes. Postgres prints such texts as `\x6162` under bytea_output = hex."""
    # null entries may have bytes in the buffer: an empty value in their place keeps the arithmetic below valid
    filled = texts.cast(pa.string()).fill_null("\\x")
    _, offsets_buffer, text_buffer = filled.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[filled.offset : filled.offset + len(filled) + 1].astype(
        np.int64
    )
    raw = np.frombuffer(text_buffer, dtype=np.uint8) if text_buffer else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if (lengths < len(_BYTEA_PREFIX)).any() or (lengths % 2).any():
        raise pa.ArrowInvalid("expected bytea text in hexadecimal form")
    if any((raw[starts + index] != byte).any() for index, byte in enumerate(_BYTEA_PREFIX)):
        raise pa.ArrowInvalid("expected bytea text in hexadecimal form")
    is_digit = np.ones(offsets[-1] - offsets[0] if len(offsets) else 0, dtype=bool)
    for index in range(len(_BYTEA_PREFIX)):
        is_digit[starts - offsets[0] + index] = False
    digits = _DIGIT_VALUES[raw[offsets[0] : offsets[-1]][is_digit]]
    if (digits == _NOT_A_DIGIT).any():
        raise pa.ArrowInvalid("expected bytea text in hexadecimal form")
    values = (digits[0::2] << 4 | digits[1::2]).astype(np.uint8)
    ends = np.concatenate(([0], np.cumsum((lengths - len(_BYTEA_PREFIX)) // 2))).astype(np.int32)
    valid = texts.is_valid() if texts.null_count else None
    validity = pa.array(valid).buffers()[1] if valid is not None else None
    return pa.Array.from_buffers(pa.binary(), len(texts), [validity, pa.py_buffer(ends), pa.py_buffer(values)])


EXACT_BY_OID: Final[dict[int, Family]] = {
    16: Family("boolean", pa.bool_(), _convert_boolean),
    21: cast_family("smallint", pa.int16()),
    23: cast_family("integer", pa.int32()),
    20: cast_family("bigint", pa.int64()),
    26: cast_family("oid", pa.int64()),  # unsigned, so it needs the next wider type
    700: cast_family("real", pa.float32()),
    701: cast_family("double precision", pa.float64()),
    1082: cast_family("date", pa.date32(), is_total=False),
    1114: cast_family("timestamp", pa.timestamp("us"), is_total=False),
    1184: cast_family("timestamptz", pa.timestamp("us", tz="UTC"), is_total=False),
    17: Family("bytea", pa.binary(), _convert_bytea),
}
"""Type OID (pg_type.dat) → family. Without numeric, whose family depends on the type modifier; see numeric_family."""

MAX_PRECISION: Final = 38
"""Maximum precision of decimals in Delta and Spark; Postgres allows 1,000."""
_HEADER: Final = 4  # VARHDRSZ: src/include/utils/numeric.h packs a modifier above it
_SCALE_BITS: Final = 11


def precision_and_scale(typmod: int) -> tuple[int, int] | None:
    """Return (precision, scale) from the type modifier of a numeric; None if the modifier declares no precision."""
    if typmod < _HEADER:
        return None
    packed = typmod - _HEADER
    half = 1 << (_SCALE_BITS - 1)
    return packed >> 16 & 0xFFFF, (packed & ((1 << _SCALE_BITS) - 1) ^ half) - half


def numeric_modifier(precision: int, scale: int) -> int:
    """Return the type modifier of numeric(precision, scale)."""
    return (precision << 16 | scale & ((1 << _SCALE_BITS) - 1)) + _HEADER


def numeric_family(typmod: int) -> Family | None:
    """Return the decimal family of numerics with this type modifier; None if only text represents them exactly."""
    declared = precision_and_scale(typmod)
    if declared is None:
        return None
    precision, scale = declared
    if precision > MAX_PRECISION or not 0 <= scale <= precision:
        return None
    return cast_family(f"numeric({precision},{scale})", pa.decimal128(precision, scale), is_total=False)


_NULL: Final = "NULL"
_NOT_PLAIN: Final = r'(?s)["\\]|\A\{\}|\A[^{]|.\{|\}.|[^}]\z|\A.?\z'
"""Pattern of array literals that cannot be split at commas: with quotes, inner braces or no elements."""


def array_family(element: Family) -> Family:
    """Return the family of arrays whose elements have the family `element`. Its type is a list.

    Its `convert` refuses an array with several dimensions, or with a first subscript other than 1.
    """
    arrow = pa.list_(pa.field("element", element.arrow))

    def convert(texts: pa.Array) -> pa.Array:
        lists = _element_texts(texts)
        # a null list has no elements
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
        values = element.convert(lists.flatten())
        return pa.ListArray.from_arrays(ends, values, type=arrow, mask=pc.is_null(texts) if texts.null_count else None)

    return Family(f"{element.name}[]", arrow, convert, is_total=False)


def _element_texts(literals: pa.Array) -> pa.Array:
    """Convert array literals to lists with the text of each element."""
    is_parsed = pc.fill_null(pc.match_substring_regex(literals, _NOT_PLAIN), True)
    plain = pc.utf8_slice_codeunits(literals.filter(pc.invert(is_parsed)), 1, -1)
    split = pc.split_pattern(plain, ",").cast(pa.list_(pa.string()))
    flat = split.flatten()
    if pc.any(pc.equal(flat, "")).as_py():
        raise pa.ArrowInvalid("expected array text without empty elements")
    lists = pa.ListArray.from_arrays(split.offsets, pc.if_else(pc.equal(flat, _NULL), None, flat))
    if plain.offset == 0 and len(plain) == len(literals):
        return lists
    parsed = [None if text is None else parse_array(text) for text in literals.filter(is_parsed).to_pylist()]
    together = pa.concat_arrays([lists, pa.array(parsed, pa.list_(pa.string()))])
    return together.take(_indexes_after_split(is_parsed))


def _indexes_after_split(is_parsed: pa.Array) -> pa.Array:
    """Return the new index of each row, after the rows were reordered: first all plain rows, then all parsed rows."""
    parsed = is_parsed.cast(pa.int64())
    parsed_before = pc.subtract(pc.cumulative_sum(parsed), parsed)
    rows = pa.array(range(len(is_parsed)), pa.int64())
    plain = len(is_parsed) - (pc.sum(parsed).as_py() or 0)
    return pc.if_else(is_parsed, pc.add(parsed_before, plain), pc.subtract(rows, parsed_before))


_OID_OF: Final = {family.arrow: oid for oid, family in reversed(EXACT_BY_OID.items())} | {TEXT.arrow: TEXT_OID}
_ARRAY_OF: Final = {element: oid for oid, element in ELEMENT_BY_OID.items()} | {TEXT_OID: TEXT_ARRAY_OID}


def family_of(column: Column, policy: Policy) -> Family:
    """Return the family of a column's values under a policy. A domain has the family of its base type."""
    chosen = policy.of(column.name)
    if chosen is TypePolicy.TEXT:
        return TEXT
    oid, typmod = column.value_type
    element = _element_of(column, oid, typmod)
    # in a key an array stays text: not every engine joins lists
    is_scalar = element is None or column.key is not None
    family = _scalar_family(oid, typmod) if is_scalar or element is None else array_family(element)
    if family.is_total or chosen is TypePolicy.EXACT:
        return family
    if chosen is TypePolicy.LOSSLESS:
        return TEXT
    return family.with_nulls() if is_scalar and column.key is None else family


def declared_as(arrow: pa.DataType) -> tuple[int, int]:
    """Return (type OID, modifier) of a Postgres type whose values become this Arrow type under EXACT."""
    if pa.types.is_list(arrow):
        oid, typmod = declared_as(arrow.value_type)
        return _ARRAY_OF[oid], typmod
    if pa.types.is_decimal(arrow):
        return NUMERIC_OID, numeric_modifier(arrow.precision, arrow.scale)
    return _OID_OF[arrow], -1


def _scalar_family(oid: int, typmod: int) -> Family:
    if oid == NUMERIC_OID:
        return numeric_family(typmod) or TEXT
    return EXACT_BY_OID.get(oid, TEXT)


def _element_of(column: Column, oid: int, typmod: int) -> Family | None:
    """Return the family of the elements of an array column; None if the column's type is not an array."""
    element = element_type(oid, column.type_name)
    return None if element is None else _scalar_family(element, typmod)


ArrayConversion = Callable[[pa.Array], pa.Array]

_DIGITS: Final = {pa.int16(): 5, pa.int32(): 10, pa.int64(): 19}


def widening(before: pa.DataType, after: pa.DataType, *, recast: bool) -> ArrayConversion | None:
    """Return a function that converts arrays of type `before` to type `after`; None if no conversion is exact.

    recast: True if the column's type changed at the source, where Postgres has cast the values. The function must then
    give the same result as this cast. False if the type changed only in the target.
    """
    if before == after or _widens(before, after):
        return lambda values: values.cast(after)
    if not pa.types.is_string(after):
        return None
    if recast:
        # a cast from other types may differ from the printed text (boolean: `true`, not `t`) or depend on the session
        cast_prints = pa.types.is_integer(before) or pa.types.is_decimal(before) or pa.types.is_date(before)
        return to_postgres_text if cast_prints else None
    return to_postgres_text


def _widens(before: pa.DataType, after: pa.DataType) -> bool:
    if pa.types.is_integer(before) and pa.types.is_integer(after):
        return bool(before.bit_width <= after.bit_width)
    if before == pa.float32() and after == pa.float64():
        return True
    if not pa.types.is_decimal(after) or (before not in _DIGITS and not pa.types.is_decimal(before)):
        return False
    whole, scale = (_DIGITS[before], 0) if before in _DIGITS else (before.precision - before.scale, before.scale)
    return bool(after.scale >= scale and after.precision - after.scale >= whole)
