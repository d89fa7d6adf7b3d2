r"""bytea: the hexadecimal form `\x6162` that bytea_output = hex prints."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa

from pipelines.types.family import Family

_PREFIX: Final = np.frombuffer(b"\\x", dtype=np.uint8)
_NO_DIGIT: Final = 255


def _digits() -> np.ndarray:
    table = np.full(256, _NO_DIGIT, dtype=np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        table[digit] = value
    return table


_DIGIT: Final = _digits()


def _convert(texts: pa.Array) -> pa.Array:
    # null slots may hide bytes: an empty string under them keeps the arithmetic below whole
    filled = texts.cast(pa.string()).fill_null("\\x")
    _, offsets_buffer, text_buffer = filled.buffers()
    offsets = np.frombuffer(offsets_buffer, dtype=np.int32)[filled.offset : filled.offset + len(filled) + 1].astype(
        np.int64
    )
    raw = np.frombuffer(text_buffer, dtype=np.uint8) if text_buffer else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    if (lengths < len(_PREFIX)).any() or (lengths % 2).any():
        raise pa.ArrowInvalid("bytea text that is not in hexadecimal form")
    if any((raw[starts + place] != sign).any() for place, sign in enumerate(_PREFIX)):
        raise pa.ArrowInvalid("bytea text that is not in hexadecimal form")
    keep = np.ones(offsets[-1] - offsets[0] if len(offsets) else 0, dtype=bool)
    for place in range(len(_PREFIX)):
        keep[starts - offsets[0] + place] = False
    digits = _DIGIT[raw[offsets[0] : offsets[-1]][keep]]
    if (digits == _NO_DIGIT).any():
        raise pa.ArrowInvalid("bytea text that is not in hexadecimal form")
    values = (digits[0::2] << 4 | digits[1::2]).astype(np.uint8)
    ends = np.concatenate(([0], np.cumsum((lengths - len(_PREFIX)) // 2))).astype(np.int32)
    valid = texts.is_valid() if texts.null_count else None
    validity = pa.array(valid).buffers()[1] if valid is not None else None
    return pa.Array.from_buffers(pa.binary(), len(texts), [validity, pa.py_buffer(ends), pa.py_buffer(values)])


BYTEA = Family("bytea", pa.binary(), _convert)
BY_OID = {17: BYTEA}
