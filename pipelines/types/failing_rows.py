"""The rows of a table that a conversion refuses, found by halving the table."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from cdc.errors import CdcError, ValueNotRepresentable


def failing_rows(rows: pa.Table, convert: Callable[[pa.Table], object], limit: int) -> dict[int, CdcError]:
    """Return row number → error, for the rows that `convert` refuses; not many more than `limit` rows."""
    found: dict[int, CdcError] = {}
    left = [(0, rows.num_rows)]
    while left and len(found) <= limit:
        low, high = left.pop()
        if low == high:
            continue
        try:
            convert(rows.slice(low, high - low))
        except ValueNotRepresentable as exc:
            if high - low == 1:
                found[low] = exc
            else:
                middle = (low + high) // 2
                left += [(middle, high), (low, middle)]
    return found
