"""Rows of each history mode, made from the states of a table: versions, marked rows, every change. Pure.

The rows do not depend on how a history is cut into ranges. A version is found by its key and start, a marked row by its
key, a change by its position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import Operation
from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from cdc.table import TableSchema
from cdc.target_names import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    FROM_COLUMN,
    GENERATION_COLUMN,
    OP_COLUMN,
    ORDINAL_COLUMN,
    POSITION_COLUMN,
    START_COLUMN,
    TO_COLUMN,
    column_name,
)
from pipelines.folding.every_change import GenerationEnd
from pipelines.folding.keyless_fold import row_ids
from pipelines.sinks.delta.complete_changes import RowStates, StoredRows
from pipelines.sinks.delta.table_plan import RowShape
from pipelines.sinks.delta.target_layout import MODE_COLUMNS

_TIME: Final = pa.timestamp("us", tz="UTC")


def tracked_columns(shape: RowShape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Delta names of the columns whose changes begin a version; schema: the table with the names of its source."""
    wanted, unwanted = set(settings.track_history_column_list), set(settings.track_history_except_column_list)
    source_name = {column.id: column.name for column in schema.columns}
    names = [(column_name(column.name), source_name.get(column.id, column.name)) for column in shape.schema.sent]
    keys = set(shape.key)
    return [
        delta_name
        for delta_name, name in names
        if delta_name not in keys and (not wanted or name in wanted) and name not in unwanted
    ]


def version_rows(states: RowStates, stored: StoredRows, tracked: Sequence[str]) -> pa.Table:
    """The complete rows of the versions that a range began, changed or ended.

    stored: the current versions of every key of the states. A transaction begins at most one version of a key. A change
    of columns that are not tracked changes the current version.
    """
    states = states.filter(_is_last(states.key, states.position))
    count = len(states)
    same_key = np.append(False, states.key[1:] == states.key[:-1])
    values = row_ids((states.rows[name] for name in tracked), count)
    continues = same_key & states.exists & _previous(states.exists) & (values == _previous(values))
    first = np.flatnonzero(states.exists & ~continues)
    run = np.cumsum(states.exists & ~continues)[states.exists] - 1
    last = np.zeros(len(first), np.int64)
    last[run] = np.flatnonzero(states.exists)  # the last of several states wins
    after = last + 1
    ended = np.append(same_key, False)[after]
    changed = ended | (states.stored[last] < 0)
    first, last, after, ended = (numbers[changed] for numbers in (first, last, after, ended))
    begun, position = states.stored[first], np.append(states.position, 0)
    is_new = begun < 0
    added = {
        START_COLUMN: _new_or_stored(is_new, pa.array(position[first]), stored.rows[START_COLUMN], begun),
        END_COLUMN: pa.array(position[after], mask=~ended),
        FROM_COLUMN: _new_or_stored(is_new, _times(states.committed_at[first]), stored.rows[FROM_COLUMN], begun),
        TO_COLUMN: _times(np.append(states.committed_at, 0)[after], ~ended),
    }
    return _with_mode_columns(states.rows.take(pa.array(last)), added, HistoryMode.VERSIONS)


def marked_rows(states: RowStates) -> pa.Table:
    """The complete row of every key that a range changed; a deleted row has its last values and the mark.

    A key whose row was never seen has no row here.
    """
    count = len(states)
    latest = np.flatnonzero(_is_last(states.key, states.key))
    first = np.append(0, latest[:-1] + 1) if count else latest
    seen = np.maximum.accumulate(np.where(_has_row(states), np.arange(count), -1))[latest]
    wanted = (seen >= first) & (states.stored[latest] < 0)
    latest, seen = latest[wanted], seen[wanted]
    rows = states.rows.take(pa.array(seen))
    for name in (POSITION_COLUMN, ORDINAL_COLUMN):
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), states.rows[name].take(latest))
    added = {
        DELETED_COLUMN: pa.array(~states.exists[latest]),
        COMMITTED_COLUMN: _times(states.committed_at[latest]),
    }
    return _with_mode_columns(rows, added, HistoryMode.MARKED)


def change_rows(states: RowStates, ops: pa.ChunkedArray, endings: Sequence[GenerationEnd]) -> pa.Table:
    """Every change and every ending of a range as a row; ops: the operations of the images."""
    changes = states.filter(states.change >= 0)
    added = {
        OP_COLUMN: ops.take(pa.array(changes.change)),
        COMMITTED_COLUMN: _times(changes.committed_at),
        GENERATION_COLUMN: pa.nulls(len(changes), pa.int64()),
    }
    rows = _with_mode_columns(changes.rows, added, HistoryMode.CHANGES)
    if not endings:
        return rows
    values = {
        POSITION_COLUMN: [ending.position for ending in endings],
        ORDINAL_COLUMN: [ending.ordinal for ending in endings],
        OP_COLUMN: [Operation.TRUNCATE if e.began is None else Operation.GENERATION for e in endings],
        COMMITTED_COLUMN: pa.array([ending.committed_at for ending in endings], pa.int64()).cast(_TIME),
        GENERATION_COLUMN: [ending.began for ending in endings],
    }
    nulls = [None] * len(endings)
    ends = [pa.array(values.get(field.name, nulls), field.type) for field in rows.schema]
    return pa.concat_tables([rows, pa.Table.from_arrays(ends, schema=rows.schema)])


def _has_row(states: RowStates) -> np.ndarray:
    """Which states have a complete row, including rows of the target that are marked as deleted."""
    return states.exists | (states.stored >= 0)


def _is_last(key: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Which states are the last of their key and group; bool."""
    return np.append((key[1:] != key[:-1]) | (group[1:] != group[:-1]), True)[: len(key)]


def _previous(values: np.ndarray) -> np.ndarray:
    """The value before each value; the first one is its own."""
    return np.append(values[:1], values[:-1])


def _new_or_stored(is_new: np.ndarray, new: pa.Array, stored: pa.ChunkedArray, numbers: np.ndarray) -> pa.Array:
    """For every row the new value, or the stored one with that number."""
    old = stored.combine_chunks().take(pa.array(numbers, mask=is_new))
    return pc.if_else(pa.array(is_new), new.cast(old.type), old)


def _times(committed_at: np.ndarray, unknown: np.ndarray | None = None) -> pa.Array:
    return pa.array(committed_at, mask=unknown).cast(_TIME)


def _with_mode_columns(rows: pa.Table, added: Mapping[str, pa.Array | pa.ChunkedArray], mode: HistoryMode) -> pa.Table:
    names = MODE_COLUMNS[mode].names
    schema = pa.schema([*rows.schema, *MODE_COLUMNS[mode]])
    return pa.Table.from_arrays([*rows.columns, *(added[name] for name in names)], schema=schema)
