"""Which rows of a view with `keep` are old: those whose time, a column of the key, is before a floor.

The floor follows the commit times of the cuts, never the clock, so that the same cuts always give the same rows. It
moves in steps and never back: at each step the old rows in the log are deleted, and no later computation returns them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import ViewColumnRefused
from cdc.table import TableSchema
from pipelines.types import TypePolicy
from pipelines.types.typed_rows import typed_keys
from pipelines.views.view_columns import view_images, view_keys

if TYPE_CHECKING:
    from pipelines.views.log_of_views import Cut

_SECOND: Final = 1_000_000
LONGEST_STEP: Final = 86_400.0
"""Seconds by which the floor moves at most; a shorter `keep` has ten steps."""
_STEPS: Final = 10
_TIMES: Final = frozenset({1082, 1114, 1184})
"""OIDs of the types date, timestamp and timestamp with time zone (pg_type.dat)."""


def floor_at(cut: Cut, keep: float | None, earlier: int | None) -> int | None:
    """Return the time before which rows are old at a cut, in microseconds since 1970 UTC; None: no row is old.

    keep: seconds for which rows are kept. earlier: the floor at the cut before.
    """
    if keep is None or not cut.committed_at:
        return earlier
    step = max(1, int(min(LONGEST_STEP, keep / _STEPS) * _SECOND))
    oldest = cut.committed_at - int(keep * _SECOND)
    floor = oldest - oldest % step
    return floor if earlier is None else max(floor, earlier)


def check_time(schema: TableSchema) -> None:
    """Raise ViewColumnRefused if a view with `keep` has not one column with a time in its key."""
    times = [column.name for column in schema.key if column.type_oid in _TIMES]
    if len(times) != 1:
        names = ", ".join(column.name for column in schema.key)
        raise ViewColumnRefused(
            f"view {schema.topic!r} has 'keep', and its key ({names}) has {len(times) or 'no'} columns of type date or "
            "timestamp",
            remedy="let the key have one column with the time of a row, or remove 'keep'",
        )


def without_old(rows: pa.Table, schema: TableSchema, floor: int | None) -> pa.Table:
    """Leave out the old rows of a result."""
    return rows if floor is None else rows.filter(pc.invert(_is_old(rows, schema, floor)))


def view_rows(result: pa.Table, schema: TableSchema, floor: int | None) -> pa.Table:
    """Return the rows of a result that are not old, as keys and images."""
    result = without_old(result, schema, floor)
    return pa.table({"key": view_keys(result, schema), "after": view_images(result, schema)})


def old_rows(state: pa.Table, schema: TableSchema, floor: int) -> pa.Table:
    """Return the old ones of the rows of a view in its log, which have the columns `key` and `after`."""
    return state.filter(_is_old(typed_keys(state["key"], schema, TypePolicy.EXACT), schema, floor))


def _is_old(rows: pa.Table, schema: TableSchema, floor: int) -> pa.ChunkedArray:
    """Return one bool per row. A row without a time, which no view may have, is not old."""
    name = next(column.name for column in schema.key if column.type_oid in _TIMES)
    times = rows[name]
    if pa.types.is_date(times.type):
        times = times.cast(pa.timestamp("us"))
    return pc.fill_null(pc.less(times.cast(pa.int64()), floor), fill_value=False)
