"""Checksums of many rows, which do not depend on the order of the rows: bucket checksums and the server's digest.

Both are computed from rows of canonical text, in constant memory. Two different multisets of rows have equal checksums
with a probability of about 2**-128.

- `Checksum` divides the keys into buckets by their hash. For each bucket it computes the number of rows and the sums of
  two 64-bit hashes per row. Comparing the checksums of source and target shows in which buckets they differ.
- `digest_of` computes the digest of a target's rows. For the source, `digest_rows` in
  `cdc.postgres.key_range_digests` has the server compute it, so no row leaves the source. The two functions share no
  code, but follow the same rule. Hash the lengths and texts of the columns of each row with SHA-256. Then add up the
  first 64-bit words of all hashes, and separately the second ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.cached_njit import cached_njit
from cdc.postgres.key_range_digests import Digest, DigestColumn, DigestForm
from cdc.table import Column

BUCKETS: Final = 1 << 16
"""Number of buckets of keys; two checksums take 3 MB. With 10 million rows, a bucket has about 150 rows to compare."""

_P1: Final = np.uint64(0x9E3779B185EBCA87)
_P2: Final = np.uint64(0xC2B2AE3D27D4EB4F)
_P3: Final = np.uint64(0x165667B19E3779F9)
_P4: Final = np.uint64(0xFF51AFD7ED558CCD)
_P5: Final = np.uint64(0xC4CEB9FE1A85EC53)
_NULL: Final = np.uint64(0xA0761D6478BD642F)
_U29: Final = np.uint64(29)
_U33: Final = np.uint64(33)
_U35: Final = np.uint64(35)
_U8: Final = np.uint64(8)
_SEEDS: Final = (np.uint64(0x2545F4914F6CDD1D), np.uint64(0x9FB21C651E98DF25))

_NULL_TEXT: Final = pa.scalar("-", pa.large_string())
_EMPTY: Final = pa.scalar("", pa.large_string())
_COLON: Final = pa.scalar(":", pa.large_string())
_FLOATS: Final = {700: (DigestForm.BITS_32, pa.float32()), 701: (DigestForm.BITS_64, pa.float64())}
_NUMERIC: Final = 1700
_HEADER: Final = 4
"""Offset of a type modifier, which is (precision << 16 | scale) + 4 (numeric.c, make_numeric_typmod)."""
_SCALE: Final = 0x7FF


@cached_njit
def _finish(state: np.uint64) -> np.uint64:
    # murmur3's 64-bit finaliser: every input bit reaches every output bit
    state ^= state >> _U33
    state *= _P4
    state ^= state >> _U33
    state *= _P5
    return state ^ (state >> _U33)


@cached_njit
def _mix_column(lane: np.ndarray, offsets: np.ndarray, content: np.ndarray, valid: np.ndarray) -> None:
    for row in range(lane.size):
        state = lane[row] * _P3 + _P2
        if not valid[row]:
            lane[row] = _finish(state ^ _NULL)
            continue
        start, stop = offsets[row], offsets[row + 1]
        word = np.uint64(0)
        filled = 0
        for at in range(start, stop):
            word = (word << _U8) | np.uint64(content[at])
            filled += 1
            if filled == 8:  # noqa: PLR2004
                state ^= word * _P1
                state = ((state << _U29) | (state >> _U35)) * _P2
                word = np.uint64(0)
                filled = 0
        state ^= word * _P1
        # with the length, ('ab','c') and ('a','bc') have different hashes, and so have '' and NULL
        lane[row] = _finish(state * _P2 + np.uint64(stop - start) + np.uint64(1))


@cached_njit
def _add(sums: np.ndarray, buckets: np.ndarray, first: np.ndarray, second: np.ndarray) -> None:
    for row in range(buckets.size):
        bucket = buckets[row]
        sums[0, bucket] += np.uint64(1)
        sums[1, bucket] += first[row]
        sums[2, bucket] += second[row]


def row_hashes(columns: Sequence[pa.Array], seed: int = 0) -> np.ndarray:
    """Compute one 64-bit hash per row over string columns in their order; seed 0 or 1 selects the hash function."""
    lane = np.full(len(columns[0]), _SEEDS[seed], np.uint64)
    for column in columns:
        whole = column.cast(pa.large_string())
        _, offset_buffer, content_buffer = whole.buffers()
        if not len(whole):
            break
        offsets = np.frombuffer(offset_buffer, np.int64)[whole.offset : whole.offset + len(whole) + 1]
        content = np.frombuffer(content_buffer or b"", np.uint8)
        _mix_column(lane, offsets, content, pc.is_valid(whole).to_numpy(zero_copy_only=False))
    return lane


def buckets_of(keys: Sequence[pa.Array]) -> np.ndarray:
    """Return the bucket of each row. keys: the key columns, or all columns of a table without a key."""
    return (row_hashes(keys) % np.uint64(BUCKETS)).astype(np.int64)


class Checksum:
    """The checksum of the rows of a source or a target, by bucket of keys; the order of the rows does not matter."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, BUCKETS), np.uint64)

    def add(self, columns: Sequence[pa.Array], keys: Sequence[pa.Array]) -> None:
        """Add rows to the checksum. columns: all compared columns in a fixed order. keys: the key columns."""
        if len(columns[0]):
            _add(self._sums, buckets_of(keys), row_hashes(columns), row_hashes(columns, 1))

    @property
    def rows(self) -> int:
        """Return the number of rows added."""
        return int(self._sums[0].sum())

    @property
    def counts(self) -> np.ndarray:
        """Return the number of rows in each bucket."""
        return self._sums[0]

    def differing(self, other: Checksum) -> np.ndarray:
        """Return the numbers of the buckets in which two checksums differ, ascending."""
        return np.flatnonzero((self._sums != other._sums).any(axis=0))


def digest_of(batches: Iterable[pa.RecordBatch]) -> Digest:
    """Compute the digest of rows of text columns, as the source server computes it for its rows."""
    rows, sums = 0, np.zeros(2, np.uint64)
    for batch in batches:
        if not batch.num_rows:
            continue
        words = b"".join(sha256(text.encode()).digest()[:16] for text in _texts(batch))
        sums += np.frombuffer(words, ">u8").reshape(-1, 2).astype(np.uint64).sum(axis=0, dtype=np.uint64)
        rows += batch.num_rows
    return Digest(rows, int(sums[0]), int(sums[1]))


def digest_column(column: Column, kind: pa.DataType) -> DigestColumn | None:
    """Return how the source server prints a column as canonical text; None if the server cannot do so.

    kind: the type of the column in the target.
    """
    type_oid, modifier = column.value_type
    if pa.types.is_floating(kind):
        form, exact = _FLOATS.get(type_oid, (DigestForm.PRINTED, None))
        return DigestColumn(column.name, form) if kind == exact else None
    if pa.types.is_decimal(kind):
        # a declared scale makes Postgres print every value with that number of decimals
        declared = modifier >= _HEADER and (modifier - _HEADER) & _SCALE == kind.scale
        return DigestColumn(column.name) if type_oid == _NUMERIC and declared else None
    element = kind
    while pa.types.is_list(element) or pa.types.is_large_list(element):
        element = element.value_type
    if element is not kind and (pa.types.is_floating(element) or pa.types.is_decimal(element)):
        return None  # the server cannot print the numbers inside an array in another form
    return None if pa.types.is_nested(element) else DigestColumn(column.name)


def _texts(batch: pa.RecordBatch) -> list[str]:
    fields = []
    for column in batch.columns:
        text = column.cast(pa.large_string())
        length = pc.utf8_length(text).cast(pa.large_string())
        joined = pc.binary_join_element_wise(length, _COLON, text, _EMPTY, null_handling="emit_null")
        fields.append(pc.if_else(pc.is_valid(text), joined, _NULL_TEXT))
    whole: list[str] = pc.binary_join_element_wise(*fields, _EMPTY).to_pylist()
    return whole
