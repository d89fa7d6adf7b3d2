"""JSON texts, column by column: arrays of texts become arrays of JSON values, and arrays of values become objects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from json.encoder import encode_basestring  # type: ignore[attr-defined] # written in C, and missing in the stubs
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Pieces = list[pa.Array | str]
"""Pieces of texts for `concatenated`."""
MAX_STRING_BYTES: Final = (1 << 31) - 1
"""Number of bytes of all texts of a StringArray, at most."""
NULL: Final = pa.scalar("null")
_FIRST_PRINTABLE: Final = 0x20
_LARGE: Final = pa.large_string()


def quote(text: str) -> str:
    """Return a text as a JSON string."""
    quoted: str = encode_basestring(text)
    return quoted


def quoted(texts: pa.StringArray) -> pa.StringArray:
    """Return texts as JSON strings, of the same type; null stays null."""
    if has_control_characters(texts):
        return pa.array([None if text is None else encode_basestring(text) for text in texts.to_pylist()], texts.type)
    if needs_escape(texts):
        texts = pc.replace_substring(pc.replace_substring(texts, "\\", "\\\\"), '"', '\\"')
    return concatenated(['"', texts, '"'])


def quoted_pieces(texts: pa.StringArray) -> Pieces:
    """Return the pieces of texts as JSON strings, with `null` in place of Arrow's null."""
    if texts.null_count or needs_escape(texts):
        return [or_null(quoted(texts))]
    return ['"', texts, '"']  # the texts are copied once less


def needs_escape(texts: pa.StringArray) -> bool:
    """Return whether any of the texts contains a character that JSON escapes."""
    content = text_bytes(texts)
    return bool(((content < _FIRST_PRINTABLE) | (content == ord('"')) | (content == ord("\\"))).any())


def has_control_characters(texts: pa.StringArray) -> bool:
    """Return whether any of the texts contains a character that JSON escapes by a letter or a number."""
    content = text_bytes(texts)
    return bool(len(content) and content.min() < _FIRST_PRINTABLE)


def contains_only(texts: pa.StringArray, characters: frozenset[int]) -> bool:
    """Return whether all texts consist of these ASCII characters."""
    allowed = np.zeros(256, dtype=bool)
    allowed[list(characters)] = True
    return bool(allowed[text_bytes(texts)].all())


def each_distinct(texts: pa.StringArray, convert: Callable[[str], str | None]) -> pa.StringArray:
    """Convert each distinct text once with a function of Python.

    The result is null for null, and where the function returns None or raises ValueError or ArithmeticError.
    """
    distinct = texts.dictionary_encode()
    return pa.array([_or_none(convert, text) for text in distinct.dictionary.to_pylist()], pa.string()).take(
        distinct.indices
    )


def _or_none(convert: Callable[[str], str | None], text: str) -> str | None:
    try:
        return convert(text)
    except (ValueError, ArithmeticError):
        return None


def or_null(values: pa.StringArray) -> pa.StringArray:
    """Return JSON values with `null` in place of Arrow's null."""
    return pc.fill_null(values, NULL) if values.null_count else values


def concatenated(pieces: Sequence[pa.Array | str], limit: int = MAX_STRING_BYTES) -> pa.StringArray:
    """Join texts element by element; a piece is an array, or one text for every element.

    The result is null where one of the arrays is null; it is a LargeStringArray if it has more bytes than the limit.
    Neighbouring constant texts cost nothing.
    """
    merged: Pieces = []
    for piece in pieces:
        if isinstance(piece, str) and merged and isinstance(merged[-1], str):
            merged[-1] += piece
        else:
            merged.append(piece)
    arrays = [piece for piece in merged if isinstance(piece, pa.Array)]
    count = len(arrays[0]) if arrays else 1
    is_large = any(array.type == _LARGE for array in arrays) or sum(_bytes_of(piece, count) for piece in merged) > limit
    text_type = _LARGE if is_large else pa.string()
    typed = [_scalar(piece, text_type) if isinstance(piece, str) else _cast(piece, text_type) for piece in merged]
    return pc.binary_join_element_wise(*typed, _scalar("", text_type))


def listed(values: Sequence[pa.StringArray]) -> pa.StringArray:
    """Join JSON values or members element by element with commas between them, without those that are null."""
    # Arrow's own option to skip nulls leaves out the rows in which all are null
    parts = [pc.fill_null(concatenated([value, ","]), "") for value in values]
    return pc.ascii_rtrim(concatenated(parts), ",")


def members(fields: Iterable[tuple[str, pa.Array | str | Pieces]]) -> Pieces:
    """Return the pieces of a JSON object, of pairs in order: a name, and a JSON value or its pieces."""
    pieces: Pieces = ["{"]
    for number, (name, value) in enumerate(fields):
        pieces += [f"{',' if number else ''}{quote(name)}:", *(value if isinstance(value, list) else [value])]
    return [*pieces, "}"]


def numbers(values: pa.Array) -> pa.StringArray:
    """Return integers as JSON numbers; null stays null."""
    return values.cast(pa.string())


def text_bytes(texts: pa.StringArray) -> np.ndarray:
    """Return the bytes of all texts, or of an array of bytes, one after the other."""
    content = texts.buffers()[2]
    if content is None:
        return np.empty(0, dtype=np.uint8)
    first, last = _bounds(texts)
    return np.frombuffer(content, dtype=np.uint8)[first:last]


def _cast(texts: pa.StringArray, text_type: pa.DataType) -> pa.StringArray:
    return texts if texts.type == text_type else texts.cast(text_type)


@lru_cache(maxsize=256)
def _scalar(text: str, text_type: pa.DataType) -> pa.Scalar:
    return pa.scalar(text, text_type)


def _bytes_of(piece: pa.Array | str, count: int) -> int:
    """Return the number of bytes of an array of texts, or of `count` times a constant text."""
    if isinstance(piece, str):
        return len(piece.encode()) * count
    first, last = _bounds(piece)
    return last - first


def _bounds(texts: pa.StringArray) -> tuple[int, int]:
    if not len(texts):
        return 0, 0
    width = np.int64 if texts.type in {pa.large_string(), pa.large_binary()} else np.int32
    offsets = np.frombuffer(texts.buffers()[1], dtype=width)
    return int(offsets[texts.offset]), int(offsets[texts.offset + len(texts)])
