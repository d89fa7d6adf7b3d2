"""Key hashes: 128 bits per key, equal for keys that Delta's merge treats as equal.

For each key column, the hash function reads the length of the value's canonical text, then the text. So `1` has the
same hash as a smallint and as a bigint, and the keys (`a`, `bc`) and (`ab`, `c`) are different inputs. The hash
function is SipHash-2-4 with a result of 128 bits (Aumasson and Bernstein, 2012). Without its secret key nobody can
construct two keys with the same hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.cached_njit import cached_njit
from pipelines.sinks.delta.indexed.key_index import KeyHashes

_INITIAL: Final = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
_EE: Final = np.uint64(0xEE)
_DD: Final = np.uint64(0xDD)
_8: Final = np.uint64(8)
_13: Final = np.uint64(13)
_16: Final = np.uint64(16)
_17: Final = np.uint64(17)
_21: Final = np.uint64(21)
_32: Final = np.uint64(32)
_43: Final = np.uint64(43)
_47: Final = np.uint64(47)
_48: Final = np.uint64(48)
_51: Final = np.uint64(51)

State = tuple[np.uint64, np.uint64, np.uint64, np.uint64]


@cached_njit
def _round(v0: np.uint64, v1: np.uint64, v2: np.uint64, v3: np.uint64) -> State:
    v0 += v1
    v1 = ((v1 << _13) | (v1 >> _51)) ^ v0
    v0 = (v0 << _32) | (v0 >> _32)
    v2 += v3
    v3 = ((v3 << _16) | (v3 >> _48)) ^ v2
    v0 += v3
    v3 = ((v3 << _21) | (v3 >> _43)) ^ v0
    v2 += v1
    v1 = ((v1 << _17) | (v1 >> _47)) ^ v2
    v2 = (v2 << _32) | (v2 >> _32)
    return v0, v1, v2, v3


@cached_njit
def _absorb(states: np.ndarray, offsets: np.ndarray, content: np.ndarray) -> None:
    """Add one text to the SipHash state of each row: the length of the text, then its bytes.

    The bytes are read as 64-bit words; the last word is padded with zeros. The text of row n is
    `content[offsets[n]:offsets[n + 1]]`.
    """
    for row in range(states.shape[0]):
        v0, v1, v2, v3 = states[row, 0], states[row, 1], states[row, 2], states[row, 3]
        start, stop = offsets[row], offsets[row + 1]
        word, at = np.uint64(stop - start), start
        while True:
            v3 ^= word
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
            v0 ^= word
            if at >= stop:
                break
            word = np.uint64(0)
            for place in range(at, min(at + 8, stop)):
                word |= np.uint64(content[place]) << (_8 * np.uint64(place - at))
            at += 8
        states[row, 0], states[row, 1], states[row, 2], states[row, 3] = v0, v1, v2, v3


@cached_njit
def _finish(states: np.ndarray, high: np.ndarray, low: np.ndarray) -> None:
    for row in range(high.size):
        v0, v1, v2, v3 = states[row, 0], states[row, 1], states[row, 2] ^ _EE, states[row, 3]
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        high[row] = v0 ^ v1 ^ v2 ^ v3
        v1 ^= _DD
        for _ in range(4):
            v0, v1, v2, v3 = _round(v0, v1, v2, v3)
        low[row] = v0 ^ v1 ^ v2 ^ v3


def can_hash(kind: pa.DataType) -> bool:
    """Return whether executors can find a key column of this type by its hash. They leave lists to the driver, because
    equal lists of floats may have several texts, so that their changes may be in several parts.
    """
    return not pa.types.is_nested(kind)


def hash_keys(keys: Sequence[pa.Array | pa.ChunkedArray], secret: bytes) -> tuple[KeyHashes, np.ndarray]:
    """Return the hash and the row number of each key, except keys that contain NULL.

    keys: the key columns. secret: the key of the hash function, 16 bytes. A key with NULL needs no hash, because it
    equals no other key.
    """
    columns = [canonical_text(column) for column in keys]
    valid = np.ones(len(columns[0]), bool)
    for column in columns:
        if column.null_count:
            valid &= column.is_valid().to_numpy(zero_copy_only=False)
    rows = np.flatnonzero(valid)
    if rows.size < valid.size:
        columns = [column.take(pa.array(rows)) for column in columns]
    return _hashes(columns, rows.size, secret), rows


def _hashes(columns: Sequence[pa.Array], rows: int, secret: bytes) -> KeyHashes:
    first, second = np.frombuffer(secret, "<u8")
    start = np.array(_INITIAL, np.uint64) ^ np.array([first, second, first, second], np.uint64)
    start[1] ^= _EE
    states = np.tile(start, (rows, 1))
    for column in columns if rows else ():
        _, offset_buffer, content_buffer = column.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64)[column.offset : column.offset + rows + 1]
        _absorb(states, offsets, np.frombuffer(content_buffer or b"", np.uint8))
    found = KeyHashes(np.empty(rows, np.uint64), np.empty(rows, np.uint64))
    _finish(states, found.high, found.low)
    return found


def canonical_text(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Convert the values of a key column to large texts or large binary values, equal for keys that are equal."""
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = whole.type
    if pa.types.is_dictionary(kind):
        return canonical_text(whole.dictionary_decode())
    if pa.types.is_floating(kind):
        # -0 and 0 are one key
        return pc.add(whole, pa.scalar(0, kind)).cast(pa.large_string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return whole.cast(pa.large_binary())
    if pa.types.is_timestamp(kind):
        # Spark may have written nanoseconds
        return whole.cast(pa.timestamp("us", kind.tz), safe=False).cast(pa.int64()).cast(pa.large_string())
    if pa.types.is_list(kind):
        return _canonical_lists(whole)
    return whole.cast(pa.large_string())


def _canonical_lists(lists: pa.ListArray) -> pa.Array:
    """Convert lists to large binary values. Each element has its length before it, and a NULL is a mark of its own."""
    elements = canonical_text(lists.flatten()).cast(pa.large_binary()).to_pylist()
    framed = [b"-" if element is None else b"%d:%b" % (len(element), element) for element in elements]
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy()
    ends = np.cumsum(lengths)
    joined = [b"".join(framed[begin:end]) for begin, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
    return pa.array(joined, pa.large_binary(), mask=lists.is_null().to_numpy(zero_copy_only=False))
