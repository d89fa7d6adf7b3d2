"""History rows: makes the rows of each history mode from the states of a table, without I/O.

A state of a key is one of: the row in the target before the batch, the row after a change, or no row after a truncate
or the end of a copy (see pipelines.sinks.delta.history_row_states). The rows are the same however the log is divided
into batches. The key and the start position identify a version, the key identifies a marked row, and the position
identifies a change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from cdc.log_row import Operation
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
from pipelines.folding.history_changes import GenerationEnd
from pipelines.folding.keyless_fold import row_ids
from pipelines.sinks.delta.history_row_states import RowStates, StoredRows
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.sinks.delta.target_layout import MODE_COLUMNS

_TIME: Final = pa.timestamp("us", tz="UTC")


def tracked_columns(shape: RowShape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Return the Delta names of the columns whose changes begin a new version of a row.

    settings: the settings of the table; they name columns as the source does. schema: the schema of the source table.
    """
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
    """Return the complete rows of the versions that a batch began, changed or ended.

    stored: for each key, its current version in the target. tracked: the columns whose changes begin a new version; a
    change of other columns updates the current version. A transaction begins at most one version of a key.
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
    """Return one complete row for each key that a batch changed; a deleted row has its last values and the mark.

    A key is left out if the batch only deletes it and the target has no row of it.
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
    """Return one row for each change, and for each truncate or end of a copy in `endings`.

    ops: the operation of each image; `states.change` contains indexes into it.
    """
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
    """Return, as one bool per state, whether the state has a complete row; also true for a row marked as deleted."""
    return states.exists | (states.stored >= 0)


def _is_last(key: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Return one bool per state: whether the next state has another value in `key` or `group`, or does not exist."""
    return np.append((key[1:] != key[:-1]) | (group[1:] != group[:-1]), True)[: len(key)]


def _previous(values: np.ndarray) -> np.ndarray:
    """Return the array shifted by one: each entry has the value before it, and the first entry keeps its value."""
    return np.append(values[:1], values[:-1])


def _new_or_stored(is_new: np.ndarray, new: pa.Array, stored: pa.ChunkedArray, numbers: np.ndarray) -> pa.Array:
    """Return one value per row: from `new` where `is_new` is true, otherwise the stored value at index `numbers`."""
    old = stored.combine_chunks().take(pa.array(numbers, mask=is_new))
    return pc.if_else(pa.array(is_new), new.cast(old.type), old)


def _times(committed_at: np.ndarray, unknown: np.ndarray | None = None) -> pa.Array:
    return pa.array(committed_at, mask=unknown).cast(_TIME)


def _with_mode_columns(rows: pa.Table, added: Mapping[str, pa.Array | pa.ChunkedArray], mode: HistoryMode) -> pa.Table:
    names = MODE_COLUMNS[mode].names
    schema = pa.schema([*rows.schema, *MODE_COLUMNS[mode]])
    return pa.Table.from_arrays([*rows.columns, *(added[name] for name in names)], schema=schema)
