"""History modes: what the rows of a target with history are, how a change finds them, and how an ending closes them.

`versions` keeps every version of a row, with the positions between which it was in force (slowly changing dimension,
type 2). `marked` keeps the latest row of each key and marks it when it is deleted. `changes` appends every change.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from cdc.errors import ValueNotRepresentable
from cdc.stores.dead_letter_rows import Key
from cdc.target_names import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    OP_COLUMN,
    ORDINAL_COLUMN,
    POSITION_COLUMN,
    START_COLUMN,
    TO_COLUMN,
)
from pipelines.folding.every_change import GenerationEnd
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.base_lookup import rows_with_keys
from pipelines.sinks.delta.key_equality import latest, numbered
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.row_states import States, StoredState
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.versions import all_columns, change_rows, marked_rows, tracked_columns, version_rows
from pipelines.types.typed_rows import typed_keys

_NEVER: Final = int(np.iinfo(np.int64).max)


class HistoryRows(ABC):
    """The rows of one target under one mode, for the length of one batch."""

    mode: HistoryMode
    open_rows: str | None
    """SQL that is true for the rows that are at the source; None where no ending closes a row."""

    def __init__(self, target: DeltaTarget, shape: RowShape, settings: TableSettings) -> None:
        self.target, self.shape, self.settings = target, shape, settings
        self.columns = all_columns(shape.columns, self.mode)

    @property
    @abstractmethod
    def find_columns(self) -> tuple[str, ...]:
        """The columns by which a row of the merge finds the row that it replaces; empty: it is appended."""

    @abstractmethod
    def new_rows(self, there: States, stored: StoredState, batch: TableBatch, images: pa.Table, done: int) -> pa.Table:
        """The rows, whole, that a range adds to the target or replaces in it.

        there: the states of the images. done: the position up to which endings are in the target.
        """

    def stored(self, images: pa.Table) -> StoredState:
        """The rows of the target that the images build on."""
        if not images.num_rows or not self.shape.schema.key or not self.target.files()[0]:
            return StoredState(self.columns.empty_table(), np.zeros(0, bool))
        named = pa.chunked_array([*images["key"].chunks, *images["base"].drop_null().chunks])
        return self._read(typed_keys(named, self.shape.schema, self.shape.policy))

    def stored_before(self, images: pa.Table) -> StoredState:
        """The rows that the changes of keys build on which were parked until now."""
        return self.stored(images)

    def without_parked(self, stored: StoredState, waiting: Sequence[Key]) -> StoredState:  # noqa: ARG002 - see MarkedRows
        """The stored rows that this range may change, without those of parked keys where they must wait."""
        return stored

    def not_parked(self, waiting: Sequence[Key]) -> str:  # noqa: ARG002 - see MarkedRows
        """SQL that is true for the rows of `without_parked`."""
        return "true"

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:  # noqa: ARG002 - see VersionRows and MarkedRows
        """Column → SQL expression of a row that the ending closes; empty where no ending closes a row."""
        return {}

    def _read(self, keys: pa.Table) -> StoredState:
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        return StoredState(rows, np.ones(rows.num_rows, bool))


class VersionRows(HistoryRows):
    """Every version of a row."""

    mode = HistoryMode.VERSIONS
    open_rows = f'"{END_COLUMN}" IS NULL'

    @property
    def find_columns(self) -> tuple[str, ...]:
        """The key and the position at which the version began."""
        return (*self.shape.key, START_COLUMN)

    def new_rows(self, there: States, stored: StoredState, batch: TableBatch, images: pa.Table, done: int) -> pa.Table:  # noqa: ARG002
        """See HistoryRows.new_rows."""
        return version_rows(there, stored, tracked_columns(self.shape, batch.schema, self.settings))

    def stored_before(self, images: pa.Table) -> StoredState:
        """Of each parked key the version before its first change.

        An ending that came since has closed that version, as if there had been no change between.
        """
        if not self.target.files()[0]:
            return self.stored(images)
        keys = typed_keys(images["key"], self.shape.schema, self.shape.policy)
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        first = _first_of(rows, keys, images["position"].to_numpy())
        begun, ended = rows[START_COLUMN].to_numpy(), pc.fill_null(rows[END_COLUMN], _NEVER).to_numpy()
        # a version that ended in the transaction of the first change may continue in it
        rows = rows.filter(pa.array((begun < first) & (first <= ended))).combine_chunks()
        return StoredState(rows, np.ones(rows.num_rows, bool))

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:
        """See HistoryRows.closing."""
        return {END_COLUMN: str(ending.position), TO_COLUMN: _timestamp(ending)}

    def _read(self, keys: pa.Table) -> StoredState:
        rows = rows_with_keys(self.target.table, keys, self.columns, self.open_rows).combine_chunks()
        return StoredState(rows, np.ones(rows.num_rows, bool))


class MarkedRows(HistoryRows):
    """The latest row of each key, marked when it is deleted."""

    mode = HistoryMode.MARKED
    open_rows = f'NOT "{DELETED_COLUMN}"'

    @property
    def find_columns(self) -> tuple[str, ...]:
        """The key."""
        return self.shape.key

    def new_rows(self, there: States, stored: StoredState, batch: TableBatch, images: pa.Table, done: int) -> pa.Table:  # noqa: ARG002
        """See HistoryRows.new_rows."""
        return marked_rows(there)

    def without_parked(self, stored: StoredState, waiting: Sequence[Key]) -> StoredState:
        """Not the rows of parked keys: a mark of now would be later than changes that are still to come."""
        keys = self._typed_keys(waiting)
        if keys is None or not stored.rows.num_rows:
            return stored
        others = ~_among(stored.rows, keys)
        return StoredState(stored.rows.filter(pa.array(others)).combine_chunks(), stored.alive[others])

    def not_parked(self, waiting: Sequence[Key]) -> str:
        """See HistoryRows.not_parked."""
        keys = self._typed_keys(waiting)
        if keys is None:
            return "true"
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        rows = rows.filter(pa.array(_among(rows, keys)))
        places = zip(rows[POSITION_COLUMN].to_pylist(), rows[ORDINAL_COLUMN].to_pylist(), strict=True)
        named = ", ".join(f"'{int(position)}/{int(ordinal)}'" for position, ordinal in places)
        place = f"concat(CAST({POSITION_COLUMN} AS VARCHAR), '/', CAST({ORDINAL_COLUMN} AS VARCHAR))"
        return f"{place} NOT IN ({named})" if named else "true"

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:
        """See HistoryRows.closing."""
        place = {POSITION_COLUMN: str(ending.position), ORDINAL_COLUMN: str(ending.ordinal)}
        return {DELETED_COLUMN: "true", COMMITTED_COLUMN: _timestamp(ending), **place}

    def _read(self, keys: pa.Table) -> StoredState:
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        return StoredState(rows, ~rows[DELETED_COLUMN].to_numpy())

    def _typed_keys(self, keys: Sequence[Key]) -> pa.Table | None:
        """Convert keys to typed columns, without keys that the target cannot represent; None if no key remains."""
        found = [typed for typed in map(self._typed_key, keys) if typed is not None]
        return pa.concat_tables(found) if found else None

    def _typed_key(self, key: Key) -> pa.Table | None:
        try:
            return typed_keys(pa.array([key], pa.list_(pa.string())), self.shape.schema, self.shape.policy)
        except ValueNotRepresentable:
            return None


class ChangeRows(HistoryRows):
    """Every change and every ending, appended."""

    mode = HistoryMode.CHANGES
    open_rows = None

    @property
    def find_columns(self) -> tuple[str, ...]:
        """None: nothing is replaced."""
        return ()

    def new_rows(self, there: States, stored: StoredState, batch: TableBatch, images: pa.Table, done: int) -> pa.Table:  # noqa: ARG002
        """See HistoryRows.new_rows."""
        return change_rows(there, images["op"], [ending for ending in batch.endings if ending.position > done])

    def stored(self, images: pa.Table) -> StoredState:
        """The rows that partial images build on; a whole image needs none."""
        return super().stored(images.filter(pc.invert(pc.fill_null(images["complete"], fill_value=True))))

    def _read(self, keys: pa.Table) -> StoredState:
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        rows = latest(rows.filter(pc.is_in(rows[OP_COLUMN], pa.array(["c", "d", "r", "u"]))), self.shape.key)
        return StoredState(rows, pc.not_equal(rows[OP_COLUMN], "d").to_numpy())


ROWS_OF: Final[Mapping[HistoryMode, type[HistoryRows]]] = {
    kind.mode: kind for kind in (VersionRows, MarkedRows, ChangeRows)
}
"""The rows of each mode."""


def _timestamp(ending: GenerationEnd) -> str:
    """SQL of the commit time of an ending."""
    return f"arrow_cast({ending.committed_at}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _among(rows: pa.Table, keys: pa.Table) -> np.ndarray:
    """Which rows are of one of the keys."""
    return _first_of(rows, keys, np.zeros(keys.num_rows, np.int64)) == 0


def _first_of(rows: pa.Table, keys: pa.Table, positions: np.ndarray) -> np.ndarray:
    """For each row the first of the positions of its key, -1 if it has none; of each of the keys there is one."""
    names = keys.column_names
    numbers = numbered(pa.concat_tables([rows.select(names), keys]))
    first = np.full(int(numbers.max(initial=-1)) + 1, _NEVER)
    np.minimum.at(first, numbers[rows.num_rows :], positions)
    found = first[numbers[: rows.num_rows]]
    return np.where(found == _NEVER, -1, found)
