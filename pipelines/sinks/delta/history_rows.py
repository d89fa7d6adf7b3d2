"""History rows: turns the changes of a range of the log into the rows of a target with history.

This module does no I/O; it computes with Arrow and numpy. An *ending* is a truncate or the end of a full copy. A
*state* of a key is one of: the row in the target before the range, the row after a change, or no row after an ending.
`complete_changes` returns the states of a table, sorted by key and position. From them `version_rows`, `marked_rows`
and `change_rows` make the rows of the three history modes. The rows are the same however the log is divided into
ranges. The key and the start position identify a version, the key identifies a marked row, and the position identifies
a change.

A partial image takes its unsent columns from an earlier state. That state belongs to the same key, or to the old key if
the change moved the row to another key. So each cell refers to the state that has its value. The code follows the
references of a column for all rows at once, until no reference changes. A reference to nothing means that the base row
is missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.config.delta_sink import HistoryMode
from cdc.errors import MissingBase
from cdc.log_row import Operation
from cdc.position import Position
from cdc.table import TableState
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
)
from pipelines.folding.history_changes import GenerationEnd
from pipelines.folding.keyless_fold import row_ids
from pipelines.sinks.delta.merge_source import key_numbers
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.sinks.delta.target_layout import MODE_COLUMNS
from pipelines.types.typed_rows import sent_cells, typed_keys

_NONE: Final = -1
_TIME: Final = pa.timestamp("us", tz="UTC")

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a target that complete the partial images of a range, at most one row for each key."""

    rows: pa.Table
    """The rows, with at least the columns of the target's RowShape, in the order of that shape."""
    exists: np.ndarray
    """One bool per row: whether the row exists at the source."""


@dataclass(frozen=True, slots=True)
class RowStates:
    """The states of the rows of one table, sorted by key, then position; every field has one entry per state.

    A state is the row in the target before the range, the row after a change, or no row after a truncate or the end of
    a full copy.
    """

    rows: pa.Table
    """The row of each state. It is null after a truncate or the end of a copy. After a delete, only the key and the
    columns that Postgres sent are not null.
    """
    key: np.ndarray
    """The number of each state's key; equal keys have equal numbers."""
    exists: np.ndarray
    """One bool per state: whether the row exists at the source after the state."""
    committed_at: np.ndarray
    """Commit time of each state in µs since 1970 UTC; 0 for a row that was in the target before the range."""
    stored: np.ndarray
    """Index of each state's row in StoredRows.rows; -1 after a change, a truncate or the end of a copy."""
    change: np.ndarray
    """Index of each state's change in the table of row images; -1 for a stored row, a truncate or the end of a copy."""

    @property
    def position(self) -> np.ndarray:
        """The position of each state, as integers."""
        return np.asarray(self.rows[POSITION_COLUMN])

    def __len__(self) -> int:
        return len(self.key)

    def filter(self, wanted: np.ndarray) -> RowStates:
        """Return the states whose entry in `wanted`, an array of bool, is true."""
        rows = self.rows.filter(pa.array(wanted))
        names = ("key", "exists", "committed_at", "stored", "change")
        return RowStates(rows=rows, **{name: getattr(self, name)[wanted] for name in names})


def complete_changes(
    images: pa.Table, stored: StoredRows, endings: Sequence[GenerationEnd], shape: RowShape
) -> RowStates:
    """Return every state of each key that occurs in the row images or in the stored rows.

    images: changes as pipelines.folding.history_changes returns them. stored: rows of the target, for each key that a
    partial image may need as its base row. endings: truncates and ends of full copies in the range. While the table is
    being copied, a partial image without a base row makes no state. Otherwise it raises MissingBase. Raises
    ValueNotRepresentable for a value that the target cannot represent.
    """
    typed = typed_changes(images, shape)
    key_states = _KeyStates.of(images, typed, stored, shape)
    for ending in sorted(endings):
        key_states = key_states.with_ending(ending)
    key_states = key_states.ordered(np.lexsort((key_states.ordinal, key_states.position, key_states.key)))
    count = stored.rows.num_rows
    sent = np.concatenate([np.ones((len(shape.schema.sent), count), bool), _sent_columns(images, shape)], axis=1)
    cells, missing = _source_states(key_states, _base_states(key_states), sent)
    _check_bases(key_states.position[missing], shape)
    values = pa.concat_tables([stored.rows.select(shape.image_columns.names), typed])
    states = RowStates(
        rows=_complete_rows(values, key_states, cells, sent),
        key=key_states.key,
        exists=key_states.exists,
        committed_at=key_states.committed_at,
        stored=np.where(key_states.value < count, key_states.value, _NONE),
        change=np.where(key_states.value < count, _NONE, key_states.value - count),
    )
    return states.filter(~missing) if missing.any() else states


def typed_changes(images: pa.Table, shape: RowShape) -> pa.Table:
    """Convert row images to rows with the columns and types of the target; each row gets the key of its change.

    The value of a cell that Postgres did not send is undefined. Raises ValueNotRepresentable for an image or a key that
    the target cannot represent.
    """
    typed = shape.rows(images)
    if not shape.schema.key:
        return typed
    keys = typed_keys(images["key"], shape.schema, shape.policy, images["position"])
    columns = [keys[name] if name in keys.column_names else typed[name] for name in typed.column_names]
    return pa.Table.from_arrays(columns, schema=typed.schema)


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


@dataclass(frozen=True, slots=True)
class _KeyStates:
    """The states of one table, before partial images are completed; each field has one entry per state."""

    key: np.ndarray
    position: np.ndarray
    ordinal: np.ndarray
    committed_at: np.ndarray
    exists: np.ndarray
    partial: np.ndarray
    base: np.ndarray
    """Number of the row's old key, if a partial image moved the row to another key; -1 for all other states."""
    value: np.ndarray
    """Index of the state's own values in a table that has the stored rows first, then the changes; -1 for a state
    after a truncate or the end of a copy.
    """

    @classmethod
    def of(cls, images: pa.Table, typed: pa.Table, stored: StoredRows, shape: RowShape) -> Self:
        """Make one state for each stored row and for each change.

        `with_ending` later adds the states after truncates and ends of copies.
        """
        changes, count = images.num_rows, stored.rows.num_rows
        key, base = _numbered_keys(images, typed, stored, shape)
        upserts = pc.not_equal(images["op"], Operation.DELETE.value).to_numpy()
        partial = upserts & ~pc.fill_null(images["complete"], fill_value=True).to_numpy()
        committed = images["committed_at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        return cls(
            key=key,
            position=np.concatenate([stored.rows[POSITION_COLUMN].to_numpy(), images["position"].to_numpy()]),
            ordinal=np.concatenate([stored.rows[ORDINAL_COLUMN].to_numpy(), images["ordinal"].to_numpy()]),
            committed_at=np.concatenate([np.zeros(count, np.int64), committed.to_numpy()]),
            exists=np.concatenate([stored.exists, upserts]),
            partial=np.concatenate([np.zeros(count, bool), partial]),
            base=np.concatenate([np.full(count, _NONE), np.where(partial, base, _NONE)]),
            value=np.arange(count + changes),
        )

    def ordered(self, order: np.ndarray) -> Self:
        """Return the states sorted by `order`, an array of indices."""
        return replace(self, **{name: getattr(self, name)[order] for name in self.__slots__})

    def with_ending(self, ending: GenerationEnd) -> Self:
        """Return these states and, for each key whose row the truncate or copy removes, a state without a row."""
        earlier = self._before(ending.position, ending.ordinal)
        at = np.flatnonzero(earlier)[np.lexsort((self.ordinal[earlier], self.position[earlier]))]
        last = np.full(int(self.key.max(initial=_NONE)) + 1, _NONE)
        last[self.key[at]] = at  # the last of several states wins
        last = last[last != _NONE]
        removed = last[self.exists[last]]
        if ending.began is not None:
            removed = removed[self.position[removed] < ending.began]
        values = {
            "key": self.key[removed],
            "position": np.full(len(removed), ending.position),
            "ordinal": np.full(len(removed), ending.ordinal),
            "committed_at": np.full(len(removed), ending.committed_at),
            "exists": np.zeros(len(removed), bool),
            "partial": np.zeros(len(removed), bool),
        }
        none = np.full(len(removed), _NONE)
        added = {name: np.concatenate([getattr(self, name), values.get(name, none)]) for name in self.__slots__}
        return replace(self, **added)

    def _before(self, position: int, ordinal: int) -> np.ndarray:
        same = (self.position == position) & (self.ordinal < ordinal)
        return (self.position < position) | same


def _sent_columns(images: pa.Table, shape: RowShape) -> np.ndarray:
    """Return which cells the row images contain, as an array of bool with the shape (columns, rows).

    A complete image contains every column. If a column was added after the image was written, its default counts as
    contained. A delete contains its key and the columns that Postgres sent.
    """
    complete = pc.and_(
        pc.fill_null(images["complete"], fill_value=True), pc.not_equal(images["op"], Operation.DELETE.value)
    )
    sent: np.ndarray = sent_cells(images, shape.schema) | complete.to_numpy()
    for number, column in enumerate(shape.schema.sent):
        sent[number] |= column.key is not None
    return sent


def _numbered_keys(
    images: pa.Table, typed: pa.Table, stored: StoredRows, shape: RowShape
) -> tuple[np.ndarray, np.ndarray]:
    """Number the keys; equal keys get equal numbers.

    Returns two arrays. The first has the number of the key of each stored row and then of each image. The second has,
    for each image, the number of the key from which the change moved the row, or -1 if the key did not change.
    """
    changes, count = images.num_rows, stored.rows.num_rows
    base = np.full(changes, _NONE)
    if not shape.schema.key:
        return np.arange(count + changes), base
    names = list(shape.key)
    moved = pc.is_valid(images["base"]).to_numpy()
    earlier = typed_keys(images["base"].filter(pa.array(moved)), shape.schema, shape.policy)
    numbers = key_numbers(pa.concat_tables([stored.rows.select(names), typed.select(names), earlier.select(names)]))
    base[moved] = numbers[count + changes :]
    return numbers[: count + changes], base


def _base_states(key_states: _KeyStates) -> np.ndarray:
    """Return, for each of the sorted states, the index of the state that contains its base row.

    The index is -1 for a complete state, and for a partial state without a base row.
    """
    count = len(key_states.key)
    before = np.arange(count) - 1
    here = np.flatnonzero(key_states.partial)
    found = np.full(count, _NONE)
    if not len(here):
        return found
    wanted = np.where(key_states.base[here] == _NONE, key_states.key[here], key_states.base[here])
    moved = key_states.base[here] != _NONE
    at = before[here]
    at[moved] = _last_state_before(key_states, here[moved], wanted[moved])
    valid = (at >= 0) & (key_states.key[at] == wanted) & key_states.exists[at]
    found[here[valid]] = at[valid]
    return found


def _last_state_before(key_states: _KeyStates, here: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return, for each state in `here`, the index of the last earlier state of its key in `keys`.

    keys: one key number for each state in `here`. A key change is written as a delete of the old key, then a change of
    the new key. The search skips this delete, so that it finds the row from before the key change.
    """
    _, rank = np.unique(np.stack([key_states.position, key_states.ordinal]), axis=1, return_inverse=True)
    rank = rank.reshape(-1)
    width = len(key_states.key) + 1
    at = np.searchsorted(key_states.key * width + rank, keys * width + rank[here]) - 1
    own_delete = (
        (at >= 0)
        & (key_states.key[at] == keys)
        & (key_states.position[at] == key_states.position[here])
        & (key_states.ordinal[at] == key_states.ordinal[here] - 1)
        & ~key_states.exists[at]
    )
    return np.where(own_delete, at - 1, at)


def _source_states(key_states: _KeyStates, bases: np.ndarray, sent: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """Find, for each cell of each state, the state that has the value of the cell.

    Returns (sources, missing). `sources` has one array per column: for each state, the index of the state with the
    value. `missing` has one bool per state: whether a cell has no value in any state. sent: the result of
    _sent_columns, preceded by true for each stored row.
    """
    count = len(key_states.key)
    itself, missing = np.arange(count), np.zeros(count, bool)
    if not key_states.partial.any():
        return [itself] * len(sent), missing
    previous = np.where(bases == _NONE, count, bases)
    cells = []
    for column in sent:
        at = np.append(np.where(key_states.partial & ~column[key_states.value], previous, itself), count)
        while not np.array_equal(further := at[at], at):
            at = further
        cells.append(at[:count])
        missing |= at[:count] == count
    return cells, missing


class WithoutBase(MissingBase):
    """Partial images have no base row."""

    def __init__(self, topic: str, images: int, first: int) -> None:
        """images: number of these partial images. first: position of the first one."""
        super().__init__(
            f"the target of table {topic!r} has no base row for {images} partial images, the first at {Position(first)}"
        )
        self.images, self.first = images, first


def _check_bases(positions: np.ndarray, shape: RowShape) -> None:
    """Raise WithoutBase if a state has no base row, unless a full copy of the table is running.

    positions: the positions of the states without a base row.
    """
    if not len(positions):
        return
    topic, count = shape.schema.topic, len(positions)
    if shape.schema.state is TableState.SNAPSHOTTING:
        log.debug(
            "partial images are left out, because the running full copy will write their rows",
            table=topic,
            images=count,
        )
        return
    raise WithoutBase(topic, count, int(positions.min()))


def _complete_rows(values: pa.Table, key_states: _KeyStates, cells: Sequence[np.ndarray], sent: np.ndarray) -> pa.Table:
    """Return the row of each state.

    Cells are null after a truncate or the end of a copy, and where a delete does not contain the column.
    """
    value_of = np.append(key_states.value, _NONE)
    columns = []
    for number, at in enumerate(cells):
        own = value_of[at]
        empty = (own == _NONE) | (~key_states.exists & ~sent[number][key_states.value])
        columns.append(values.column(number).combine_chunks().take(pa.array(own, mask=empty)))
    columns += [pa.array(key_states.position), pa.array(key_states.ordinal)]
    return pa.Table.from_arrays(columns, schema=values.schema)


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
