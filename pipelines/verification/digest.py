"""Digest: what the server says of rows (`cdc.postgres.key_ranges.digest_rows`), made of batches of canonical text.

The two are written apart and have only the recipe in common: of each row the SHA-256 of its columns' lengths and texts,
of all rows the sums of two words of it. Equal multisets have equal digests in any order of rows; two that differ have
equal ones with a chance of about 2**-128.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import sha256
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.postgres.key_ranges import Digest, DigestColumn, DigestForm
from cdc.table import Column

_NULL: Final = pa.scalar("-", pa.large_string())
_EMPTY: Final = pa.scalar("", pa.large_string())
_COLON: Final = pa.scalar(":", pa.large_string())
_FLOATS: Final = {700: (DigestForm.BITS_32, pa.float32()), 701: (DigestForm.BITS_64, pa.float64())}
_NUMERIC: Final = 1700
_HEADER: Final = 4
"""A modifier is precision << 16 | scale, and this on top of it (numeric.c, make_numeric_typmod)."""
_SCALE: Final = 0x7FF


def digest_of(batches: Iterable[pa.RecordBatch]) -> Digest:
    """The digest of rows of text columns."""
    rows, sums = 0, np.zeros(2, np.uint64)
    for batch in batches:
        if not batch.num_rows:
            continue
        words = b"".join(sha256(text.encode()).digest()[:16] for text in _texts(batch))
        sums += np.frombuffer(words, ">u8").reshape(-1, 2).astype(np.uint64).sum(axis=0, dtype=np.uint64)
        rows += batch.num_rows
    return Digest(rows, int(sums[0]), int(sums[1]))


def digest_column(column: Column, kind: pa.DataType) -> DigestColumn | None:
    """How the server makes a column's canonical text for a target column of that kind; None if it cannot."""
    type_oid, modifier = column.value_type
    if pa.types.is_floating(kind):
        form, exact = _FLOATS.get(type_oid, (DigestForm.PRINTED, None))
        return DigestColumn(column.name, form) if kind == exact else None
    if pa.types.is_decimal(kind):
        # declared so, every value is printed with that many decimals
        declared = modifier >= _HEADER and (modifier - _HEADER) & _SCALE == kind.scale
        return DigestColumn(column.name) if type_oid == _NUMERIC and declared else None
    element = kind
    while pa.types.is_list(element) or pa.types.is_large_list(element):
        element = element.value_type
    if element is not kind and (pa.types.is_floating(element) or pa.types.is_decimal(element)):
        return None  # its numbers would have to be written anew one by one
    return None if pa.types.is_nested(element) else DigestColumn(column.name)


def _texts(batch: pa.RecordBatch) -> list[str]:
    fields = []
    for column in batch.columns:
        text = column.cast(pa.large_string())
        length = pc.utf8_length(text).cast(pa.large_string())
        told = pc.binary_join_element_wise(length, _COLON, text, _EMPTY, null_handling="emit_null")
        fields.append(pc.if_else(pc.is_valid(text), told, _NULL))
    whole: list[str] = pc.binary_join_element_wise(*fields, _EMPTY).to_pylist()
    return whole
