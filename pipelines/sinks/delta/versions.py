"""Rows of each history mode, made from the states of a table: versions, marked rows, every change. Pure.

The rows of a mode do not depend on how a history is cut into ranges: a version is found by its key and start, a
marked row by its key, a change by its position.
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
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.row_states import States, StoredState

_TIME: Final = pa.timestamp("us", tz="UTC")

ADDED: Final[Mapping[HistoryMode, pa.Schema]] = {
    HistoryMode.LATEST: pa.schema([]),
    HistoryMode.VERSIONS: pa.schema(
        [(START_COLUMN, pa.int64()), (END_COLUMN, pa.int64()), (FROM_COLUMN, _TIME), (TO_COLUMN, _TIME)]
    ),
    HistoryMode.CHANGES: pa.schema(
        [(OP_COLUMN, pa.string()), (COMMITTED_COLUMN, _TIME), (GENERATION_COLUMN, pa.int64())]
    ),
    HistoryMode.MARKED: pa.schema([(DELETED_COLUMN, pa.bool_()), (COMMITTED_COLUMN, _TIME)]),
}
"""The columns that a target has behind `_position` and `_ordinal`."""


def all_columns(own: pa.Schema, keeping: HistoryMode) -> pa.Schema:
    """All columns of a target: its own and those that the mode adds."""
    return pa.schema([*own, *ADDED[keeping]])


def tracked_columns(shape: RowShape, schema: TableSchema, settings: TableSettings) -> list[str]:
    """Delta names of the columns of which a change begins a version; schema: the table as its source names it."""
    wanted, unwanted = set(settings.track_history_column_list), set(settings.track_history_except_column_list)
    name_of = {column.id: column.name for column in schema.columns}
    named = [(column_name(column.name), name_of.get(column.id, column.name)) for column in shape.schema.sent]
    keys = set(shape.key)
    return [
        held for held, name in named if held not in keys and (not wanted or name in wanted) and name not in unwanted
    ]


def version_rows(states: States, held: StoredState, tracked: Sequence[str]) -> pa.Table:
    """The versions that a range made or ended, whole rows.

    held: the current versions of every key of the states. One transaction makes one version of a key at most; a change
    of columns that are not tracked is made in the version that is there.
    """
    there = states.those(_last_of(states.key, states.position))
    count = len(there)
    follows = np.append(False, there.key[1:] == there.key[:-1])
    same = row_ids((there.rows[name] for name in tracked), count)
    goes_on = follows & there.alive & _shifted(there.alive) & (same == _shifted(same))
    first = np.flatnonzero(there.alive & ~goes_on)
    run = np.cumsum(there.alive & ~goes_on)[there.alive] - 1
    last = np.zeros(len(first), np.int64)
    last[run] = np.flatnonzero(there.alive)  # of several the last one stays
    after = last + 1
    ended = np.append(follows, False)[after]
    changed = ended | (there.held[last] < 0)
    first, last, after, ended = (found[changed] for found in (first, last, after, ended))
    begun, of = there.held[first], np.append(there.position, 0)
    came = begun < 0
    added = {
        START_COLUMN: _either(came, pa.array(of[first]), held.rows[START_COLUMN], begun),
        END_COLUMN: pa.array(of[after], mask=~ended),
        FROM_COLUMN: _either(came, _times(there.committed_at[first]), held.rows[FROM_COLUMN], begun),
        TO_COLUMN: _times(np.append(there.committed_at, 0)[after], ~ended),
    }
    return _with(there.rows.take(pa.array(last)), added, HistoryMode.VERSIONS)


def marked_rows(states: States) -> pa.Table:
    """The rows of every key that a range changed, whole: as they are, or as they last were and marked as deleted.

    A key of which no row was ever seen has none.
    """
    count = len(states)
    latest = np.flatnonzero(_last_of(states.key, states.key))
    first = np.append(0, latest[:-1] + 1) if count else latest
    seen = np.maximum.accumulate(np.where(_has_row(states), np.arange(count), -1))[latest]
    wanted = (seen >= first) & (states.held[latest] < 0)
    latest, seen = latest[wanted], seen[wanted]
    rows = states.rows.take(pa.array(seen))
    for name in (POSITION_COLUMN, ORDINAL_COLUMN):
        rows = rows.set_column(rows.column_names.index(name), rows.schema.field(name), states.rows[name].take(latest))
    added = {
        DELETED_COLUMN: pa.array(~states.alive[latest]),
        COMMITTED_COLUMN: _times(states.committed_at[latest]),
    }
    return _with(rows, added, HistoryMode.MARKED)


def change_rows(states: States, ops: pa.ChunkedArray, endings: Sequence[GenerationEnd]) -> pa.Table:
    """Every change and every ending of a range as a row; ops: the letters of the images."""
    there = states.those(states.change >= 0)
    added = {
        OP_COLUMN: ops.take(pa.array(there.change)),
        COMMITTED_COLUMN: _times(there.committed_at),
        GENERATION_COLUMN: pa.nulls(len(there), pa.int64()),
    }
    rows = _with(there.rows, added, HistoryMode.CHANGES)
    if not endings:
        return rows
    said = {
        POSITION_COLUMN: [ending.position for ending in endings],
        ORDINAL_COLUMN: [ending.ordinal for ending in endings],
        OP_COLUMN: [Operation.TRUNCATE if e.began is None else Operation.GENERATION for e in endings],
        COMMITTED_COLUMN: pa.array([ending.committed_at for ending in endings], pa.int64()).cast(_TIME),
        GENERATION_COLUMN: [ending.began for ending in endings],
    }
    nothing = [None] * len(endings)
    ends = [pa.array(said.get(field.name, nothing), field.type) for field in rows.schema]
    return pa.concat_tables([rows, pa.Table.from_arrays(ends, schema=rows.schema)])


def _has_row(states: States) -> np.ndarray:
    """Which states have the whole row; of the target's own those do as well that are marked as deleted."""
    return states.alive | (states.held >= 0)


def _last_of(key: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Which states are the last of their key and place; bool."""
    return np.append((key[1:] != key[:-1]) | (place[1:] != place[:-1]), True)[: len(key)]


def _shifted(values: np.ndarray) -> np.ndarray:
    """Every value moved to the one behind it; the first one stays."""
    return np.append(values[:1], values[:-1])


def _either(came: np.ndarray, new: pa.Array, held: pa.ChunkedArray, place: np.ndarray) -> pa.Array:
    """For every row what is new, or else what the target holds at a place."""
    old = held.combine_chunks().take(pa.array(place, mask=came))
    return pc.if_else(pa.array(came), new.cast(old.type), old)


def _times(committed_at: np.ndarray, unknown: np.ndarray | None = None) -> pa.Array:
    return pa.array(committed_at, mask=unknown).cast(_TIME)


def _with(rows: pa.Table, added: Mapping[str, pa.Array | pa.ChunkedArray], keeping: HistoryMode) -> pa.Table:
    schema = pa.schema([*rows.schema, *ADDED[keeping]])
    return pa.Table.from_arrays([*rows.columns, *(added[name] for name in ADDED[keeping].names)], schema=schema)
