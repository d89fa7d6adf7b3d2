"""Canonical text: the one text form of every value, in which verification compares a target with its expected rows.

Canonical text is what Postgres prints under the pinned session settings. Typed values of a target are converted to it.
Text of the source already is canonical text, with two exceptions that depend on the type in the target:

- A float becomes its bits, because its text can differ for equal bits.
- A decimal without a declared scale gets the scale of the target.

This module shares no code with `pipelines.types.typed_rows`, which converts values for the sinks. A conversion error
there would otherwise be repeated here, and verification would not find it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from decimal import Decimal, InvalidOperation
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import Column

_UNREPRESENTABLE: Final = r"^(-?infinity|NaN|-?Infinity)$| BC$|^\d{5,}-"
_DAY_US: Final = 86_400_000_000
_FIRST_USUAL_US: Final = -62_135_596_800_000_000
"""0001-01-01 in µs since 1970; Postgres prints earlier years as BC."""
_LAST_USUAL_US: Final = 253_402_300_799_999_999
"""The end of the year 9999 in µs since 1970; strftime prints later years with more than four digits."""
_NAN_BITS: Final[dict[int, np.signedinteger]] = {4: np.int32(0x7FC00000), 8: np.int64(0x7FF8000000000000)}
_QUOTED: Final = frozenset('{},"\\ \t\n\r\v\f')


def target_text(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert typed values of a target to canonical text: one string per row, null for NULL."""
    array = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
    if isinstance(array, pa.ChunkedArray):  # an empty ChunkedArray stays chunked
        array = pa.array([], values.type)
    for is_of_type, to_text in _TARGET_TEXT:
        if is_of_type(array.type):
            return to_text(array)
    return pa.array([None if value is None else str(value) for value in array.to_pylist()], pa.string())


def source_text(texts: pa.Array, target: pa.DataType) -> pa.Array:
    """Convert the source's text of one column to canonical text; target: the type of the column in the target."""
    if pa.types.is_floating(target):
        return _float_source(texts, target)
    if pa.types.is_decimal(target):
        return _decimal_source(texts, target.scale)
    if pa.types.is_list(target) or pa.types.is_large_list(target):
        return _list_source(texts, target.value_type)
    return texts.cast(pa.string())


def without_unrepresentable(texts: pa.Array) -> pa.Array:
    """Return canonical texts of dates, times or numbers, with null for those that no column of Delta represents.

    These are infinite dates and times, years BC and after 9999, and NaN.
    """
    return pc.if_else(pc.match_substring_regex(texts, _UNREPRESENTABLE), pa.scalar(None, pa.string()), texts)


def literal_text(text: str | None, target: pa.DataType) -> str | None:
    """Convert canonical text to a literal that Postgres accepts. The bits of a float become a number again."""
    if text is None or not pa.types.is_floating(target):
        return text
    kind = np.float32 if target.bit_width == 32 else np.float64  # noqa: PLR2004
    bits = np.int32 if target.bit_width == 32 else np.int64  # noqa: PLR2004
    try:
        return str(bits(int(text)).view(kind))
    except ValueError:
        return text  # the source value is not a float


def source_batch(rows: pa.RecordBatch, indices: Sequence[int], kinds: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Convert rows of a COPY, as the decoder returns them, to text columns.

    indices: indices of the wanted columns among the sent columns, in the order of the result. kinds: their types in the
    target. This function relies on a property of COPY: every image has every sent column, in the same order.
    """
    images = rows.column("after")
    offsets = images.offsets.to_numpy()
    if not len(images):
        return text_batch([pa.array([], pa.string()) for _ in indices])
    width = int(offsets[1] - offsets[0])
    starts = np.arange(len(images), dtype=np.int64) * width + int(offsets[0])
    columns = [images.items.take(pa.array(starts + index)) for index in indices]
    return text_batch([source_text(text, kind) for text, kind in zip(columns, kinds, strict=True)])


def image_batch(images: pa.Array, columns: Sequence[Column], kinds: Sequence[pa.DataType]) -> pa.RecordBatch:
    """Convert row images of the log (column id → text) to text columns; kinds: the type of each column in the target.

    If an image has no entry for a column, the row is older than the column. Then the column gets the value that
    Postgres gives it in such rows.
    """
    maps = images.combine_chunks() if isinstance(images, pa.ChunkedArray) else images
    offsets = maps.offsets.to_numpy()
    ids = maps.keys.to_numpy()[offsets[0] : offsets[-1]]
    row_of = np.repeat(np.arange(len(maps)), np.diff(offsets))
    texts = []
    for column in columns:
        of_column = np.flatnonzero(ids == column.id)
        indices = np.full(len(maps), -1, np.int64)
        indices[row_of[of_column]] = of_column + offsets[0]
        found = maps.items.take(pa.array(indices, mask=indices < 0))
        texts.append(pc.if_else(pa.array(indices < 0), pa.scalar(column.missing, pa.string()), found.cast(pa.string())))
    return text_batch([source_text(text, kind) for text, kind in zip(texts, kinds, strict=True)])


def target_batch(rows: pa.RecordBatch) -> pa.RecordBatch:
    """Convert typed rows of a target to text columns, in the same order."""
    return text_batch([target_text(column) for column in rows.columns])


def text_batch(columns: Sequence[pa.Array]) -> pa.RecordBatch:
    """Return a batch of the columns. The name of each column is its index."""
    return pa.RecordBatch.from_arrays(list(columns), names=[str(index) for index in range(len(columns))])


def _bool(array: pa.Array) -> pa.Array:
    return pc.if_else(array, "t", "f").cast(pa.string())


def _as_string(array: pa.Array) -> pa.Array:
    return array.cast(pa.string())


def _float(array: pa.Array) -> pa.Array:
    """Read the bits of each float as an integer, and return the integers as text.

    The texts of -0 and 0 differ; all NaN values have the same text.
    """
    width = array.type.bit_width // 8
    valid = pc.is_valid(array).to_numpy(zero_copy_only=False)
    plain = pc.fill_null(array, 0.0).to_numpy(zero_copy_only=False)
    bits = np.where(np.isnan(plain), _NAN_BITS[width], plain.view(np.int32 if width == 4 else np.int64))  # noqa: PLR2004
    return pa.array(bits, mask=~valid).cast(pa.string())


def _float_source(texts: pa.Array, target: pa.DataType) -> pa.Array:
    try:
        return _float(texts.cast(target))
    except pa.ArrowInvalid:
        return texts.cast(pa.string())  # text that is not a float differs from every float


def _decimal(array: pa.Array) -> pa.Array:
    texts = array.cast(pa.string())
    # Arrow prints small numbers as 1E-10, Postgres never does
    if not pc.any(pc.match_substring(texts, "E")).as_py():
        return texts
    return pa.array([None if v is None else format(v, "f") for v in array.to_pylist()], pa.string())


def _decimal_source(texts: pa.Array, scale: int) -> pa.Array:
    dots = pc.find_substring(texts, ".")
    places = pc.if_else(pc.equal(dots, -1), 0, pc.subtract(pc.subtract(pc.utf8_length(texts), dots), 1))
    if pc.all(pc.equal(places, scale), min_count=0).as_py():
        return texts.cast(pa.string())
    return pa.array([None if t is None else _rescaled(t, scale) for t in texts.to_pylist()], pa.string())


def _rescaled(text: str, scale: int) -> str:
    """Return the number with `scale` decimals.

    The text is returned unchanged if it is no finite number, or if the number has nonzero digits after `scale`
    decimals. Verification then finds a mismatch.
    """
    try:
        number = Decimal(text)
    except InvalidOperation:
        return text
    if not number.is_finite():
        return text
    sign, digits, exponent = number.as_tuple()
    shift = int(exponent) + scale
    if shift < 0 and any(digits[shift:]):
        return text
    kept = digits[:shift] or (0,) if shift < 0 else digits + (0,) * shift
    return format(Decimal((sign, kept, -scale)), "f")


def _date(array: pa.Array) -> pa.Array:
    days = array.cast(pa.date32()).cast(pa.int32()).cast(pa.int64())
    return _timestamps(pc.multiply_checked(days, _DAY_US), "%Y-%m-%d", "")


def _timestamp(array: pa.Array) -> pa.Array:
    zone = "+00" if array.type.tz else ""
    micros = array.cast(pa.timestamp("us", tz=array.type.tz)).cast(pa.int64())
    return _timestamps(micros, "%Y-%m-%d %H:%M:%S", zone)


def _timestamps(micros: pa.Array, form: str, zone: str) -> pa.Array:
    usual = pc.and_(pc.greater_equal(micros, _FIRST_USUAL_US), pc.less_equal(micros, _LAST_USUAL_US))
    inside = pc.if_else(usual, micros, 0)
    texts = pc.strftime(inside.cast(pa.timestamp("us")), format=form)
    if "%S" in form:
        texts = _without_trailing_zeros(texts)
    texts = pc.binary_join_element_wise(texts, zone, "") if zone else texts
    if pc.all(usual, min_count=0).as_py():
        return texts.cast(pa.string())
    pairs = zip(texts.to_pylist(), micros.to_pylist(), usual.to_pylist(), strict=True)
    clock = "%S" in form
    return pa.array(
        [t if u is not False else _outside_usual_years(m, zone, clock=clock) for t, m, u in pairs], pa.string()
    )


def _without_trailing_zeros(texts: pa.Array) -> pa.Array:
    """Remove trailing zeros of seconds, as Postgres does: 12:00:00.500000 → 12:00:00.5, 12:00:00.000000 → 12:00:00."""
    return pc.utf8_rtrim(pc.utf8_rtrim(texts, "0"), ".")


def _outside_usual_years(micros: int, zone: str, *, clock: bool) -> str:
    """Return a date or timestamp outside the years 1 to 9999 as Postgres prints it; clock: whether it has a time."""
    days, rest = divmod(micros, _DAY_US)
    year, month, day = _civil_from_days(days)
    era = " BC" if year < 1 else ""
    date = f"{1 - year if year < 1 else year:04d}-{month:02d}-{day:02d}"
    if not clock:
        return date + era
    seconds, fraction = divmod(rest, 1_000_000)
    tail = f".{fraction:06d}".rstrip("0") if fraction else ""
    time = f"{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"
    return f"{date} {time}{tail}{zone}{era}"


def _civil_from_days(days: int) -> tuple[int, int, int]:
    """Convert days since 1970-01-01 to (year, month, day) of the proleptic Gregorian calendar. Year 0 is 1 BC.

    Algorithm: Hinnant, "chrono-compatible low-level date algorithms", civil_from_days.
    """
    shifted = days + 719_468
    era, of_era = divmod(shifted, 146_097)
    year_of_era = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    shifted_month = (5 * of_year + 2) // 153
    day = of_year - (153 * shifted_month + 2) // 5 + 1
    month = shifted_month + 3 if shifted_month < 10 else shifted_month - 9  # noqa: PLR2004
    return year_of_era + era * 400 + (month <= 2), month, day  # noqa: PLR2004


def _time(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.time64("us")).cast(pa.int64())
    return _without_trailing_zeros(pc.strftime(micros.cast(pa.timestamp("us")), format="%H:%M:%S")).cast(pa.string())


def _binary(array: pa.Array) -> pa.Array:
    plain = array.cast(pa.large_binary())
    _, offset_buffer, bytes_buffer = plain.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64)[plain.offset : plain.offset + len(plain) + 1]
    digits = memoryview(bytes_buffer or b"")[int(offsets[0]) : int(offsets[-1])].hex().encode()
    placed = pa.py_buffer(np.ascontiguousarray((offsets - offsets[0]) * 2).tobytes())
    hexed = pa.LargeStringArray.from_buffers(len(plain), placed, pa.py_buffer(digits))
    texts = pc.binary_join_element_wise(pa.scalar("\\x", pa.large_string()), hexed, pa.scalar("", pa.large_string()))
    return pc.if_else(pc.is_valid(array), texts, pa.scalar(None, pa.large_string())).cast(pa.string())


def _duration(array: pa.Array) -> pa.Array:
    micros = array.cast(pa.duration("us")).cast(pa.int64()).to_pylist()
    return pa.array([None if m is None else str(timedelta(microseconds=m)) for m in micros], pa.string())


def _list(array: pa.Array) -> pa.Array:
    inner = target_text(array.flatten())
    nested = _is_list(array.type.value_type)
    return _arrays(array, [_element(text, nested=nested) for text in inner.to_pylist()])


def _arrays(array: pa.Array, elements: list[str]) -> pa.Array:
    texts: list[str | None] = []
    start = 0
    for length in pc.list_value_length(array).to_pylist():
        if length is None:
            texts.append(None)
            continue
        texts.append("{" + ",".join(elements[start : start + length]) + "}")
        start += length
    return pa.array(texts, pa.string())


def _element(text: str | None, *, nested: bool) -> str:
    """Return one element of an array as Postgres prints it, with its quotes (manual, section 8.15.6).

    text: None for NULL. nested: whether the element is itself an array.
    """
    if text is None:
        return "NULL"
    if nested or (text and text.upper() != "NULL" and not _QUOTED.intersection(text)):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _list_source(texts: pa.Array, element: pa.DataType) -> pa.Array:
    """Convert arrays of floats or decimals to canonical text, element by element; arrays of other types stay as they
    are.
    """
    while _is_list(element):
        element = element.value_type
    if not (pa.types.is_floating(element) or pa.types.is_decimal(element)):
        return texts.cast(pa.string())
    return pa.array([None if t is None else _array_source(t, element) for t in texts.to_pylist()], pa.string())


def _array_source(text: str, element: pa.DataType) -> str:
    # numbers are never quoted, so every brace and comma belongs to the array
    parts: list[str] = []
    word = ""
    for sign in text:
        if sign in "{},":
            parts += [_number(word, element), sign]
            word = ""
        else:
            word += sign
    return "".join([*parts, _number(word, element)])


def _number(word: str, element: pa.DataType) -> str:
    if not word or word == "NULL":
        return word
    return str(source_text(pa.array([word], pa.string()), element)[0].as_py())


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind)


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _is_bytes(kind: pa.DataType) -> bool:
    of_any_length = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind)
    return of_any_length or pa.types.is_fixed_size_binary(kind)


_TARGET_TEXT: Final[tuple[tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]], ...]] = (
    (_is_text, _as_string),
    (pa.types.is_boolean, _bool),
    (pa.types.is_integer, _as_string),
    (pa.types.is_floating, _float),
    (pa.types.is_decimal, _decimal),
    (pa.types.is_timestamp, _timestamp),
    (pa.types.is_date, _date),
    (pa.types.is_time, _time),
    (_is_bytes, _binary),
    (_is_list, _list),
    (pa.types.is_duration, _duration),
)
