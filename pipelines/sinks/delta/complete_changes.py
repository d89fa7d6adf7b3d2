"""Complete changes: each change of a range as a complete row, for targets with history. Pure, on Arrow and numpy.

A *state* of a key is one of: the row of the target before the range, the row after a change, or no row after an ending
(a truncate, or the end of a copy). The states of a table, sorted by key and position, are its history. Each history
mode makes its rows from them.

A partial image takes its unsent columns from the state before it: that of its own key, or of the key that its row had
before it moved. So every cell refers to the state with its value. The references of a column are followed for all rows
at once, until none of them changes. A reference to nothing is a missing base row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog

from cdc.change import Operation
from cdc.errors import MissingBase
from cdc.position import Position
from cdc.table import TableState
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.every_change import GenerationEnd
from pipelines.sinks.delta.merge_source import key_numbers
from pipelines.sinks.delta.table_plan import RowShape
from pipelines.types.typed_rows import sent_cells, typed_keys

_NONE: Final = -1

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class StoredRows:
    """Rows of the target on which a range builds, at most one for each key."""

    rows: pa.Table
    """At least the columns of the shape, in that order."""
    exists: np.ndarray
    """Which of them exist at the source; bool."""


@dataclass(frozen=True, slots=True)
class RowStates:
    """The states of one table, sorted by key, then position; every field has one entry per state."""

    rows: pa.Table
    """The columns of the shape; all null at an ending; for a delete the sent columns and the key."""
    key: np.ndarray
    """A number for each key."""
    exists: np.ndarray
    """Whether the row exists after this state; bool."""
    committed_at: np.ndarray
    """µs UTC; 0 for a row of the target."""
    stored: np.ndarray
    """Index of the state's row in the target's rows, -1 for a state of the range."""
    change: np.ndarray
    """Index of the state's change in the images, -1 for other states."""

    @property
    def position(self) -> np.ndarray:
        """The position of each state."""
        return np.asarray(self.rows[POSITION_COLUMN])

    def __len__(self) -> int:
        return len(self.key)

    def filter(self, wanted: np.ndarray) -> RowStates:
        """Some of the states; wanted: bool."""
        rows = self.rows.filter(pa.array(wanted))
        names = ("key", "exists", "committed_at", "stored", "change")
        return RowStates(rows=rows, **{name: getattr(self, name)[wanted] for name in names})


def complete_changes(
    images: pa.Table, stored: StoredRows, endings: Sequence[GenerationEnd], shape: RowShape
) -> RowStates:
    """All states of the keys of the images (as pipelines.folding.every_change makes them) and of the stored rows.

    stored: the rows of all keys on which a partial image may build, and of keys to compare with. While the table is
    being copied, an image without a base row is left out. Otherwise raises MissingBase for it. Raises
    ValueNotRepresentable as typed_rows does.
    """
    typed = typed_changes(images, shape)
    timeline = _Timeline.of(images, typed, stored, shape)
    for ending in sorted(endings):
        timeline = timeline.with_ending(ending)
    timeline = timeline.ordered(np.lexsort((timeline.ordinal, timeline.position, timeline.key)))
    count = stored.rows.num_rows
    sent = np.concatenate([np.ones((len(shape.schema.sent), count), bool), _sent_columns(images, shape)], axis=1)
    cells, missing = _source_states(timeline, _base_states(timeline), sent)
    _check_bases(missing, timeline, shape)
    values = pa.concat_tables([stored.rows.select(shape.image_columns.names), typed])
    states = RowStates(
        rows=_complete_rows(values, timeline, cells, sent),
        key=timeline.key,
        exists=timeline.exists,
        committed_at=timeline.committed_at,
        stored=np.where(timeline.value < count, timeline.value, _NONE),
        change=np.where(timeline.value < count, _NONE, timeline.value - count),
    )
    return states.filter(~missing) if missing.any() else states


def typed_changes(images: pa.Table, shape: RowShape) -> pa.Table:
    """The images as rows of the shape, each with its key; unsent cells have any value.

    Raises ValueNotRepresentable for an image or a key, as typed_rows does.
    """
    typed = shape.rows(images)
    if not shape.schema.key:
        return typed
    keys = typed_keys(images["key"], shape.schema, shape.policy, images["position"])
    columns = [keys[name] if name in keys.column_names else typed[name] for name in typed.column_names]
    return pa.Table.from_arrays(columns, schema=typed.schema)


@dataclass(frozen=True, slots=True)
class _Timeline:
    """The states before their rows are complete."""

    key: np.ndarray
    position: np.ndarray
    ordinal: np.ndarray
    committed_at: np.ndarray
    exists: np.ndarray
    partial: np.ndarray
    base: np.ndarray
    """Number of the key that a moved row had before; -1 for others."""
    value: np.ndarray
    """Index of the state's own values: stored rows first, then changes; -1 for an ending."""

    @classmethod
    def of(cls, images: pa.Table, typed: pa.Table, stored: StoredRows, shape: RowShape) -> Self:
        """The states of stored rows and changes, without those of endings."""
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
        """The states in another order."""
        return replace(self, **{name: getattr(self, name)[order] for name in self.__slots__})

    def with_ending(self, ending: GenerationEnd) -> Self:
        """The states with one more for each key whose row the ending removes."""
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
    """Which cells the images contain: bool, (columns, rows).

    A complete image from before a column was added has the value that rows had then. A delete has its key and the
    columns that were sent.
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
    """(number of the key of every stored row and image, number of the key from which each image moved or -1)."""
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


def _base_states(timeline: _Timeline) -> np.ndarray:
    """For each partial state of a sorted timeline the state that completes it, -1 if there is none."""
    count = len(timeline.key)
    before = np.arange(count) - 1
    here = np.flatnonzero(timeline.partial)
    found = np.full(count, _NONE)
    if not len(here):
        return found
    wanted = np.where(timeline.base[here] == _NONE, timeline.key[here], timeline.base[here])
    moved = timeline.base[here] != _NONE
    at = before[here]
    at[moved] = _last_state_before(timeline, here[moved], wanted[moved])
    valid = (at >= 0) & (timeline.key[at] == wanted) & timeline.exists[at]
    found[here[valid]] = at[valid]
    return found


def _last_state_before(timeline: _Timeline, here: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The last state of a key before each state, without the delete with which a move begins."""
    _, rank = np.unique(np.stack([timeline.position, timeline.ordinal]), axis=1, return_inverse=True)
    rank = rank.reshape(-1)
    width = len(timeline.key) + 1
    at = np.searchsorted(timeline.key * width + rank, keys * width + rank[here]) - 1
    own_delete = (
        (at >= 0)
        & (timeline.key[at] == keys)
        & (timeline.position[at] == timeline.position[here])
        & (timeline.ordinal[at] == timeline.ordinal[here] - 1)
        & ~timeline.exists[at]
    )
    return np.where(own_delete, at - 1, at)


def _source_states(timeline: _Timeline, bases: np.ndarray, sent: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(for every column the state from which each state takes its value, which states miss a value).

    sent: as of _sent_columns, with the stored rows in front.
    """
    count = len(timeline.key)
    itself, missing = np.arange(count), np.zeros(count, bool)
    if not timeline.partial.any():
        return [itself] * len(sent), missing
    previous = np.where(bases == _NONE, count, bases)
    cells = []
    for column in sent:
        at = np.append(np.where(timeline.partial & ~column[timeline.value], previous, itself), count)
        while not np.array_equal(further := at[at], at):
            at = further
        cells.append(at[:count])
        missing |= at[:count] == count
    return cells, missing


def _check_bases(missing: np.ndarray, timeline: _Timeline, shape: RowShape) -> None:
    """Raise MissingBase, unless the missing rows are still being copied."""
    if not missing.any():
        return
    topic, count = shape.schema.topic, int(missing.sum())
    if shape.schema.state is TableState.SNAPSHOTTING:
        log.debug("partial images wait until their rows are copied", table=topic, images=count)
        return
    first = Position(int(timeline.position[missing].min()))
    raise MissingBase(f"the target of table {topic!r} has no base row for {count} partial images, the first at {first}")


def _complete_rows(values: pa.Table, timeline: _Timeline, cells: Sequence[np.ndarray], sent: np.ndarray) -> pa.Table:
    """The rows of the states; a cell that neither a delete nor an ending has is null."""
    value_of = np.append(timeline.value, _NONE)
    columns = []
    for number, at in enumerate(cells):
        own = value_of[at]
        empty = (own == _NONE) | (~timeline.exists & ~sent[number][timeline.value])
        columns.append(values.column(number).combine_chunks().take(pa.array(own, mask=empty)))
    columns += [pa.array(timeline.position), pa.array(timeline.ordinal)]
    return pa.Table.from_arrays(columns, schema=values.schema)
