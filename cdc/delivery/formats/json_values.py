"""JSON values of numbers, bytes, bits, arrays and vectors, as Debezium with Kafka's JSON converter writes them.

Each function converts an array of texts that Postgres printed. Null stays null, and a text that cannot be represented
becomes null. Frequent types are converted by Arrow and numpy; rare ones by Python, once per distinct text.
"""

from __future__ import annotations

import re
from base64 import b64encode, urlsafe_b64encode
from collections.abc import Callable
from decimal import Context, Decimal
from math import isnan
from struct import pack
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.array_literal import parse_array
from cdc.json_arrays import concatenated, contains_only, each_distinct, or_null, quote, quoted

Convert = Callable[[pa.StringArray], pa.StringArray]
"""Conversion of texts to JSON values."""

_DIGITS: Final = frozenset(b"0123456789")
_INTEGER_CHARACTERS: Final = _DIGITS | frozenset(b"-")
_FLOAT_CHARACTERS: Final = _DIGITS | frozenset(b"-+.e")
_INTEGER: Final = r"^-?\d+$"
_FLOAT: Final = r"^-?\d+(\.\d+)?(e[+-]?\d+)?$"
_SPECIAL: Final = pa.array(["NaN", "Infinity", "-Infinity"])
_MAX_DECIMAL: Final = 38
"""Maximum precision of Arrow's decimal128."""
_MONEY: Final = re.compile(r"[-(]?[^\d.,]*(\d{1,3}(?:,\d{3})*(?:\.\d+)?|\d+(?:\.\d+)?)[^\d.,]*")
"""Money with commas between groups of three digits, and a point before the fraction."""
_DECIMAL_BYTES: Final = 16
_BASE64: Final = np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/", dtype=np.uint8)
_PART_DIGITS: Final = 2000
_EXACT_DIGITS: Final = 15
"""Number of decimal digits that a double always represents."""
_EXACT: Final = Context(prec=150_000)
"""A numeric of Postgres has at most 131,072 digits before the decimal point, and 16,383 after it."""
_SPECIAL_NAMES: Final = {"NaN": "NAN", "Infinity": "POSITIVE_INFINITY", "-Infinity": "NEGATIVE_INFINITY"}
"""What Debezium writes for special values of numeric as text: names of constants."""


def booleans(texts: pa.StringArray) -> pa.StringArray:
    """Return `true` for `t` and `false` for `f`."""
    values = pc.if_else(pc.equal(texts, "t"), "true", "false")
    return pc.if_else(pc.is_in(texts, pa.array(["t", "f"])), values, None)


def integers(texts: pa.StringArray) -> pa.StringArray:
    """Return integers as JSON numbers."""
    return texts if contains_only(texts, _INTEGER_CHARACTERS) else _matching(texts, _INTEGER)


def floats(texts: pa.StringArray) -> pa.StringArray:
    """Return floats as JSON numbers with the digits of Postgres; NaN and the infinities as strings, as Jackson does."""
    if contains_only(texts, _FLOAT_CHARACTERS):
        return texts
    special = pc.is_in(texts, _SPECIAL)
    return pc.if_else(special, concatenated(['"', texts, '"']), _matching(texts, _FLOAT))


def numeric_floats(texts: pa.StringArray) -> pa.StringArray:
    """Return numerics as JSON numbers of double precision."""
    longest = pc.max(pc.binary_length(texts)).as_py() or 0
    if longest <= _EXACT_DIGITS and contains_only(texts, _FLOAT_CHARACTERS):
        return texts
    return each_distinct(texts, lambda text: _json_float(repr(float(text))))


def numeric_texts(texts: pa.StringArray) -> pa.StringArray:
    """Return numerics as strings."""
    if contains_only(texts, _FLOAT_CHARACTERS):
        return concatenated(['"', texts, '"'])

    def convert(text: str) -> str:
        return quote(_SPECIAL_NAMES[text] if text in _SPECIAL_NAMES else _matched_float(text))

    return each_distinct(texts, convert)


def decimals(precision: int, scale: int) -> Convert:
    """Return the conversion of numerics to base64 of the unscaled value (`org.apache.kafka.connect.data.Decimal`)."""

    def by_python(text: str) -> str:
        return f'"{_unscaled_base64(_finite(text), scale)}"'

    def convert(texts: pa.StringArray) -> pa.StringArray:
        if not 0 <= scale <= precision <= _MAX_DECIMAL:
            return each_distinct(texts, by_python)
        try:
            values = texts.cast(pa.decimal128(precision, scale))
        except pa.ArrowInvalid:
            return each_distinct(texts, by_python)
        return _quoted_base64(values)

    return convert


def variable_decimals(texts: pa.StringArray) -> pa.StringArray:
    """Return numerics as structs of scale and unscaled value (`io.debezium.data.VariableScaleDecimal`)."""

    def convert(text: str) -> str:
        value = _finite(text).normalize(_EXACT)
        exponent = value.as_tuple().exponent
        scale = max(-exponent, 0) if isinstance(exponent, int) else 0
        return f'{{"scale":{scale},"value":"{_unscaled_base64(value, scale)}"}}'

    return each_distinct(texts, convert)


def money(scale: int | None) -> Convert:
    """Return the conversion of money; scale: digits of the fraction of a Decimal, None for a string."""

    def convert(text: str) -> str:
        found = _MONEY.fullmatch(text)
        if found is None:
            raise ValueError("a locale with other separators")
        digits = found[1].replace(",", "")
        value = Decimal(f"-{digits}" if text[0] in "-(" else digits)
        return quote(format(value, "f")) if scale is None else f'"{_unscaled_base64(value, scale)}"'

    return lambda texts: each_distinct(texts, convert)


def money_floats(texts: pa.StringArray) -> pa.StringArray:
    """Return money as JSON numbers."""
    return pc.utf8_trim(money(None)(texts), '"')


def encoded_bytes(mode: str) -> Convert:
    """Return the conversion of bytea; mode: `bytes`, `base64`, `base64-url-safe` or `hex`."""
    encode = urlsafe_b64encode if mode == "base64-url-safe" else b64encode

    def convert(text: str) -> str:
        return f'"{encode(_bytes_of(text)).decode()}"'

    def hexadecimal(texts: pa.StringArray) -> pa.StringArray:
        return concatenated(['"', pc.utf8_slice_codeunits(_matching(texts, r"^\\x[0-9a-f]*$"), 2), '"'])

    return hexadecimal if mode == "hex" else lambda texts: each_distinct(texts, convert)


def bits(texts: pa.StringArray) -> pa.StringArray:
    """Return bit strings as base64 of little-endian bytes (`io.debezium.data.Bits`)."""

    def convert(text: str) -> str:
        value = int(text or "0", 2)
        return f'"{b64encode(value.to_bytes((value.bit_length() + 7) // 8, "little")).decode()}"'

    return each_distinct(texts, convert)


def single_bits(texts: pa.StringArray) -> pa.StringArray:
    """Return bit strings of length 1 as booleans."""
    return booleans(pc.replace_substring(pc.replace_substring(texts, "1", "t"), "0", "f"))


def points(texts: pa.StringArray) -> pa.StringArray:
    """Return points as structs with both numbers and their well-known binary (`io.debezium.data.geometry.Point`)."""

    def convert(text: str) -> str:
        x, y = text.strip("()").split(",")
        binary = b64encode(pack("<BIdd", 1, 1, float(x), float(y))).decode()
        return f'{{"x":{_json_float(x)},"y":{_json_float(y)},"wkb":"{binary}","srid":null}}'

    return each_distinct(texts, convert)


def geometries(texts: pa.StringArray) -> pa.StringArray:
    """Return values of PostGIS as structs of binary and SRID (`io.debezium.data.geometry.Geometry`)."""

    def convert(text: str) -> str:
        content = bytes.fromhex(text)
        order = "little" if content[0] else "big"
        has_srid = int.from_bytes(content[1:5], order) & 0x20000000  # type: ignore[arg-type]
        srid = int.from_bytes(content[5:9], order) if has_srid else "null"  # type: ignore[arg-type]
        return f'{{"wkb":"{b64encode(content).decode()}","srid":{srid}}}'

    return each_distinct(texts, convert)


def vectors(texts: pa.StringArray) -> pa.StringArray:
    """Return vectors of pgvector, whose text is a JSON array already."""
    return _matching(texts, r"^\[[-+.,e0-9]*\]$")


def sparse_vectors(texts: pa.StringArray) -> pa.StringArray:
    """Return sparse vectors as structs; the JSON converter writes a map with numbers as keys as an array of pairs."""

    def convert(text: str) -> str:
        content, _, dimensions = text.partition("/")
        pairs = (part.split(":") for part in content.strip("{}").split(",") if part)
        entries = ",".join(f"[{int(index)},{_json_float(value)}]" for index, value in pairs)
        return f'{{"dimensions":{int(dimensions)},"vector":[{entries}]}}'

    return each_distinct(texts, convert)


_PAIR: Final = re.compile(r'"((?:[^"\\]|\\.)*)"=>(?:"((?:[^"\\]|\\.)*)"|NULL)(?:, |$)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)


def hstore_objects(texts: pa.StringArray) -> pa.StringArray:
    """Return hstore values as JSON objects."""

    def convert(text: str) -> str:
        members, at = [], 0
        while at < len(text):
            found = _PAIR.match(text, at)
            if found is None:
                raise ValueError("unexpected text")
            key, value = found.groups()
            members.append(f"{_unescaped(key)}:{'null' if value is None else _unescaped(value)}")
            at = found.end()
        return f"{{{','.join(members)}}}"

    return each_distinct(texts, convert)


def hstore_texts(texts: pa.StringArray) -> pa.StringArray:
    """Return hstore values as strings that contain JSON objects."""
    return quoted(hstore_objects(texts))


def arrays(element: Convert) -> Convert:
    """Return the conversion of arrays of one dimension whose elements `element` converts.

    The first subscript is left out. Arrays of more dimensions cannot be represented.
    """

    def convert(texts: pa.StringArray) -> pa.StringArray:
        lists = _elements(texts)
        flat = lists.flatten()
        values = element(flat)
        is_bad = values.null_count > flat.null_count
        members = pa.ListArray.from_arrays(lists.offsets, or_null(values))
        joined = concatenated(["[", pc.binary_join(members, ","), "]"])
        whole = pc.if_else(lists.is_valid(), joined, None)
        return pc.if_else(_has_bad_element(lists, flat, values), None, whole) if is_bad else whole

    return convert


def _has_bad_element(lists: pa.ListArray, flat: pa.StringArray, values: pa.StringArray) -> pa.BooleanArray:
    bad = pc.and_(values.is_null(), flat.is_valid()).to_numpy(zero_copy_only=False)
    counts = np.concatenate(([0], np.cumsum(bad)))
    offsets = lists.offsets.to_numpy()
    return pa.array(counts[offsets[1:]] > counts[offsets[:-1]])


_PLAIN_ARRAY: Final = r'(?s)\A\{[^{}"\\]+\}\z'
_BOUNDS: Final = re.compile(r"(?:\[-?\d+:-?\d+\])+=")


def _elements(texts: pa.StringArray) -> pa.ListArray:
    """Return the elements of array literals; null for null, and for arrays of more dimensions."""
    if pc.all(pc.match_substring_regex(texts, _PLAIN_ARRAY), min_count=0).as_py() is not False:
        parts = pc.split_pattern(pc.utf8_slice_codeunits(texts, 1, -1), ",")
        flat = parts.flatten()
        missing = pc.equal(flat, "NULL")
        return pa.ListArray.from_arrays(_dense_offsets(parts), pc.if_else(missing, None, flat), mask=parts.is_null())
    return pa.array([None if text is None else _parsed(text) for text in texts.to_pylist()], pa.list_(pa.string()))


def _dense_offsets(lists: pa.ListArray) -> pa.Int32Array:
    """Return offsets into `lists.flatten()`, which leaves out what null lists have in the buffer."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    return pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _parsed(text: str) -> list[str | None] | None:
    try:
        return parse_array(_BOUNDS.sub("", text, count=1) if text.startswith("[") else text)
    except pa.ArrowInvalid:
        return None


def _matching(texts: pa.StringArray, pattern: str) -> pa.StringArray:
    return pc.if_else(pc.match_substring_regex(texts, pattern), texts, None)


def _unescaped(text: str) -> str:
    return quote(_ESCAPED.sub(r"\1", text))


def _json_float(text: str) -> str:
    """Return a float as JSON number, or its name as string; repr of Python or the text of Postgres."""
    value = float(text)
    if isnan(value):
        return '"NaN"'
    return text if abs(value) < float("inf") else '"Infinity"' if value > 0 else '"-Infinity"'


def _matched_float(text: str) -> str:
    _finite(text)
    return text


def _bytes_of(text: str) -> bytes:
    if not text.startswith("\\x"):
        raise ValueError("expected hexadecimal text")
    return bytes.fromhex(text[2:])


def _finite(text: str) -> Decimal:
    value = Decimal(text)
    if not value.is_finite():
        raise ValueError("a special value is no decimal")
    return value


def _unscaled_base64(value: Decimal, scale: int) -> str:
    """Return base64 of `value * 10**scale` as the shortest big-endian two's complement."""
    shifted = value.scaleb(scale, _EXACT)
    if shifted != shifted.to_integral_value(context=_EXACT):
        raise ValueError("more digits than the scale allows")
    unscaled = _integer(format(shifted, "f").partition(".")[0])
    length = (unscaled if unscaled >= 0 else ~unscaled).bit_length() // 8 + 1
    return b64encode(unscaled.to_bytes(length, "big", signed=True)).decode()


def _integer(text: str) -> int:
    """Return a whole number of any length; Python converts at most 4,300 digits at once, and long ones slowly."""
    if len(text) <= _PART_DIGITS:
        return int(text)
    low = len(text) // 2
    sign = -1 if text.startswith("-") else 1
    return sign * (_integer(text[:-low].lstrip("-") or "0") * 10**low + _integer(text[-low:]))


def _quoted_base64(values: pa.Decimal128Array) -> pa.StringArray:
    """Return base64 of the unscaled values, in quotes; the same as `_unscaled_base64` for whole arrays."""
    count = len(values)
    if not count:
        return pa.array([], pa.string())
    first = values.offset * _DECIMAL_BYTES
    content = np.frombuffer(values.buffers()[1], dtype=np.uint8)[first : first + count * _DECIMAL_BYTES]
    raw = content.reshape(count, _DECIMAL_BYTES)[:, ::-1]
    sign = np.where(raw[:, :1] & 0x80, 0xFF, 0).astype(np.uint8)
    redundant = np.argmax(np.concatenate((raw != sign, np.ones((count, 1), bool)), axis=1), axis=1)
    kept = np.minimum(redundant, _DECIMAL_BYTES - 1)
    # the first byte that is kept must have the sign
    needs_sign_byte = (redundant < _DECIMAL_BYTES) & ((raw[np.arange(count), kept] ^ sign[:, 0]) & 0x80 != 0)
    lengths = np.maximum(_DECIMAL_BYTES - redundant + needs_sign_byte, 1)
    order = np.argsort(lengths, kind="stable")
    pieces: list[np.ndarray] = []
    widths = np.empty(count, dtype=np.int32)
    start = 0
    for length, size in zip(*np.unique(lengths, return_counts=True), strict=True):
        rows = order[start : start + size]
        text = _base64_text(raw[rows, _DECIMAL_BYTES - length :])
        pieces.append(text.reshape(-1))
        widths[start : start + size] = text.shape[1]
        start += size
    offsets = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
    grouped = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(np.concatenate(pieces)))
    place = np.empty(count, dtype=np.int64)
    place[order] = np.arange(count)
    mask = values.is_null().to_numpy(zero_copy_only=False) if values.null_count else None
    return grouped.take(pa.array(place, mask=mask))


def _base64_text(content: np.ndarray) -> np.ndarray:
    """Return base64 in quotes of rows of bytes; every row has the same length."""
    count, length = content.shape
    padding = -length % 3
    padded = np.zeros((count, length + padding), dtype=np.uint32)
    padded[:, :length] = content
    first, second, third = padded[:, 0::3], padded[:, 1::3], padded[:, 2::3]
    word = first << 16 | second << 8 | third
    text = np.full((count, word.shape[1] * 4 + 2), ord('"'), dtype=np.uint8)
    for index, shift in enumerate((18, 12, 6, 0)):
        text[:, 1 + index : -1 : 4] = _BASE64[word >> shift & 63]
    if padding:
        text[:, -1 - padding : -1] = ord("=")
    return text
