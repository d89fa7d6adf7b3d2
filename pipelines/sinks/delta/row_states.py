"""Row states: the state of each key after each change of a range, with complete rows. Pure, on Arrow and numpy.

A state is a row of the target as the range found it, a change, or an ending (a truncate, a generation's end) as one key
meets it. Sorted by key and place they are a table's history, from which each mode takes what it keeps.

A change that did not send every column takes the others from the state before it: that of its own key, or of the key
that its row moved away from. So every cell points to the state it is like, and pointers are followed at once for all
rows of a column until they stand still; what points nowhere lacks a base.
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
from pipelines.sinks.delta.key_equality import numbered
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.types.typed_rows import sent_cells, typed_keys

_NONE: Final = -1

log = structlog.get_logger("apply")


@dataclass(frozen=True, slots=True)
class StoredState:
    """Rows of the target that a range may build on, at most one for each key."""

    rows: pa.Table
    """At least the columns of the shape, in that order."""
    alive: np.ndarray
    """Which of them are there at the source; bool."""


@dataclass(frozen=True, slots=True)
class States:
    """States of one table, sorted by key, then place; every field has one entry per state."""

    rows: pa.Table
    """The columns of the shape; all null at an ending, and of a delete what was sent and its key."""
    key: np.ndarray
    """A number for each key."""
    alive: np.ndarray
    """Whether the row is there from here on; bool."""
    committed_at: np.ndarray
    """µs UTC; of a row of the target 0."""
    held: np.ndarray
    """Which row of the target it is, -1 for what came in the range."""
    change: np.ndarray
    """Which row of the images it is, -1 for others."""

    @property
    def position(self) -> np.ndarray:
        """Of the state's last change."""
        return np.asarray(self.rows[POSITION_COLUMN])

    def __len__(self) -> int:
        return len(self.key)

    def those(self, wanted: np.ndarray) -> States:
        """Some of the states; wanted: bool."""
        rows = self.rows.filter(pa.array(wanted))
        others = {name: getattr(self, name)[wanted] for name in ("key", "alive", "committed_at", "held", "change")}
        return States(rows=rows, **others)


def row_states(images: pa.Table, held: StoredState, endings: Sequence[GenerationEnd], shape: RowShape) -> States:
    """Every state of the keys that images (as pipelines.folding.every_change says) and held rows are of.

    held: of every key that an incomplete image may build on, and of every other one that the caller wants to compare
    with. While the table is being copied, an image whose base is not there is left out; otherwise raises MissingBase,
    and ValueNotRepresentable as typed_rows does.
    """
    typed = typed_changes(images, shape)
    places = _Places.of(images, typed, held, shape)
    for ending in sorted(endings):
        places = places.ended(ending)
    order = np.lexsort((places.ordinal, places.position, places.key))
    places = places.ordered(order)
    count = held.rows.num_rows
    said = np.concatenate([np.ones((len(shape.schema.sent), count), bool), _sent(images, shape)], axis=1)
    cells, lacking = _cells(places, _bases(places), said)
    _check(lacking, places, shape)
    values = pa.concat_tables([held.rows.select(shape.held.names), typed])
    there = States(
        rows=_rows(values, places, cells, said),
        key=places.key,
        alive=places.alive,
        committed_at=places.committed_at,
        held=np.where(places.value < count, places.value, _NONE),
        change=np.where(places.value < count, _NONE, places.value - count),
    )
    return there.those(~lacking) if lacking.any() else there


@dataclass(frozen=True, slots=True)
class _Places:
    """The states before their images are whole."""

    key: np.ndarray
    position: np.ndarray
    ordinal: np.ndarray
    committed_at: np.ndarray
    alive: np.ndarray
    partial: np.ndarray
    base: np.ndarray
    """The key that a moved row had, as a number; -1 for others."""
    value: np.ndarray
    """Where its own values stand: held rows, then changes; -1 for an ending."""

    @classmethod
    def of(cls, images: pa.Table, typed: pa.Table, held: StoredState, shape: RowShape) -> Self:
        rows, there = images.num_rows, held.rows.num_rows
        key, base = _numbered(images, typed, held, shape)
        changed = pc.not_equal(images["op"], Operation.DELETE.value).to_numpy()
        partial = changed & ~pc.fill_null(images["complete"], fill_value=True).to_numpy()
        committed = images["committed_at"].cast(pa.timestamp("us", tz="UTC")).cast(pa.int64())
        return cls(
            key=key,
            position=np.concatenate([held.rows[POSITION_COLUMN].to_numpy(), images["position"].to_numpy()]),
            ordinal=np.concatenate([held.rows[ORDINAL_COLUMN].to_numpy(), images["ordinal"].to_numpy()]),
            committed_at=np.concatenate([np.zeros(there, np.int64), committed.to_numpy()]),
            alive=np.concatenate([held.alive, changed]),
            partial=np.concatenate([np.zeros(there, bool), partial]),
            base=np.concatenate([np.full(there, _NONE), np.where(partial, base, _NONE)]),
            value=np.arange(there + rows),
        )

    def ordered(self, order: np.ndarray) -> Self:
        return replace(self, **{name: getattr(self, name)[order] for name in self.__slots__})

    def ended(self, ending: GenerationEnd) -> Self:
        """With a state for each key whose row the ending takes away."""
        earlier = self._before(ending.position, ending.ordinal)
        at = np.flatnonzero(earlier)[np.lexsort((self.ordinal[earlier], self.position[earlier]))]
        last = np.full(int(self.key.max(initial=_NONE)) + 1, _NONE)
        last[self.key[at]] = at  # of several the last one stays
        last = last[last != _NONE]
        gone = last[self.alive[last]]
        if ending.began is not None:
            gone = gone[self.position[gone] < ending.began]
        said = {
            "key": self.key[gone],
            "position": np.full(len(gone), ending.position),
            "ordinal": np.full(len(gone), ending.ordinal),
            "committed_at": np.full(len(gone), ending.committed_at),
            "alive": np.zeros(len(gone), bool),
            "partial": np.zeros(len(gone), bool),
        }
        nothing = np.full(len(gone), _NONE)
        added = {name: np.concatenate([getattr(self, name), said.get(name, nothing)]) for name in self.__slots__}
        return replace(self, **added)

    def _before(self, position: int, ordinal: int) -> np.ndarray:
        same = (self.position == position) & (self.ordinal < ordinal)
        return (self.position < position) | same


def typed_changes(images: pa.Table, shape: RowShape) -> pa.Table:
    """The images as rows of the shape, each with its key; cells that were not sent hold anything.

    Raises ValueNotRepresentable as typed_rows does, of an image or of a key.
    """
    typed = shape.rows(images)
    if not shape.schema.key:
        return typed
    keys = typed_keys(images["key"], shape.schema, shape.policy, images["position"])
    columns = [keys[name] if name in keys.column_names else typed[name] for name in typed.column_names]
    return pa.Table.from_arrays(columns, schema=typed.schema)


def _sent(images: pa.Table, shape: RowShape) -> np.ndarray:
    """Which cells the images say: bool, (columns, rows).

    A whole image of before a column was added says what rows had then; a deleted row says its key and what was sent.
    """
    sent = sent_cells(images, shape.schema)
    whole = pc.and_(
        pc.fill_null(images["complete"], fill_value=True), pc.not_equal(images["op"], Operation.DELETE.value)
    )
    said: np.ndarray = sent | whole.to_numpy()
    for place, column in enumerate(shape.schema.sent):
        said[place] |= column.key is not None
    return said


def _numbered(images: pa.Table, typed: pa.Table, held: StoredState, shape: RowShape) -> tuple[np.ndarray, np.ndarray]:
    """(the number of the key of every held row and image, that of the key which each image moved away from or -1)."""
    rows, there = images.num_rows, held.rows.num_rows
    base = np.full(rows, _NONE)
    if not shape.schema.key:
        return np.arange(there + rows), base
    names = list(shape.key)
    moved = pc.is_valid(images["base"]).to_numpy()
    left = typed_keys(images["base"].filter(pa.array(moved)), shape.schema, shape.policy)
    numbers = numbered(pa.concat_tables([held.rows.select(names), typed.select(names), left.select(names)]))
    base[moved] = numbers[there + rows :]
    return numbers[: there + rows], base


def _bases(places: _Places) -> np.ndarray:
    """For each partial state the one whose columns it goes on with, -1 if there is none; of sorted states."""
    count = len(places.key)
    before = np.arange(count) - 1
    here = np.flatnonzero(places.partial)
    found = np.full(count, _NONE)
    if not len(here):
        return found
    wanted = np.where(places.base[here] == _NONE, places.key[here], places.base[here])
    moved = places.base[here] != _NONE
    at = before[here]
    at[moved] = _last_before(places, here[moved], wanted[moved])
    there = (at >= 0) & (places.key[at] == wanted) & places.alive[at]
    found[here[there]] = at[there]
    return found


def _last_before(places: _Places, here: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The last state of a key before each place, but for the delete that a move itself begins with."""
    _, rank = np.unique(np.stack([places.position, places.ordinal]), axis=1, return_inverse=True)
    rank = rank.reshape(-1)
    wide = len(places.key) + 1
    at = np.searchsorted(places.key * wide + rank, keys * wide + rank[here]) - 1
    own = (
        (at >= 0)
        & (places.key[at] == keys)
        & (places.position[at] == places.position[here])
        & (places.ordinal[at] == places.ordinal[here] - 1)
        & ~places.alive[at]
    )
    return np.where(own, at - 1, at)


def _cells(places: _Places, before: np.ndarray, sent: np.ndarray) -> tuple[list[np.ndarray], np.ndarray]:
    """(for every column the state whose value each state has, which states lack a value somewhere).

    sent: as _sent, a column longer at the front for each held row.
    """
    count = len(places.key)
    itself, lacking = np.arange(count), np.zeros(count, bool)
    if not places.partial.any():
        return [itself] * len(sent), lacking
    nowhere = np.where(before == _NONE, count, before)
    cells = []
    for said in sent:
        at = np.append(np.where(places.partial & ~said[places.value], nowhere, itself), count)
        while not np.array_equal(further := at[at], at):
            at = further
        cells.append(at[:count])
        lacking |= at[:count] == count
    return cells, lacking


def _check(lacking: np.ndarray, places: _Places, shape: RowShape) -> None:
    """Raise MissingBase, unless the rows that are lacking are still being copied."""
    if not lacking.any():
        return
    topic, count = shape.schema.topic, int(lacking.sum())
    if shape.schema.state is TableState.SNAPSHOTTING:
        log.debug("images wait for the copy of their rows", table=topic, images=count)
        return
    first = Position(int(places.position[lacking].min()))
    raise MissingBase(f"the target of table {topic!r} has no base row for {count} partial images, the first at {first}")


def _rows(values: pa.Table, places: _Places, cells: Sequence[np.ndarray], said: np.ndarray) -> pa.Table:
    """The states' rows; a cell that neither a deleted row nor an ending says is null."""
    value_of = np.append(places.value, _NONE)
    columns = []
    for place, at in enumerate(cells):
        own = value_of[at]
        silent = (own == _NONE) | (~places.alive & ~said[place][places.value])
        columns.append(values.column(place).combine_chunks().take(pa.array(own, mask=silent)))
    columns += [pa.array(places.position), pa.array(places.ordinal)]
    return pa.Table.from_arrays(columns, schema=values.schema)
