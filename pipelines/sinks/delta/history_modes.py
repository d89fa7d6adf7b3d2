"""History modes: define which rows a target with history has, how a change finds a row, and which changes close a row.

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

from cdc.config.delta_sink import HistoryMode
from cdc.errors import ValueNotRepresentable
from cdc.target_names import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    ORDINAL_COLUMN,
    POSITION_COLUMN,
    START_COLUMN,
    TO_COLUMN,
)
from cdc.targets.dead_letter_rows import Key
from pipelines.folding.history_changes import GenerationEnd
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.history_row_maker import HistoryRowMaker
from pipelines.sinks.delta.history_rows import StoredRows
from pipelines.sinks.delta.merge_source import RowFinder, find_by_index, key_numbers, rows_with_keys
from pipelines.types.typed_rows import typed_keys

_NEVER: Final = int(np.iinfo(np.int64).max)


class HistoryRows(ABC):
    """Reads the rows of one target in one history mode; one object serves one batch.

    An *ending* is a truncate or the end of a full copy. It *closes* the rows that no longer exist at the source.
    """

    mode: HistoryMode
    open_rows: str | None
    """SQL condition that is true for target rows that still exist at the source; None if the mode closes no rows."""

    null_column: str | None = None
    """Column that is null in the current rows of the target and in no other row; None if there is no such column."""

    def __init__(self, target: DeltaTarget, maker: HistoryRowMaker, find_rows: RowFinder | None = None) -> None:
        """find_rows: finds the current rows with the given keys by an index; None if there is no index for them."""
        self.target, self.maker, self.shape, self._find_rows = target, maker, maker.shape, find_rows
        self.columns = maker.columns

    @property
    @abstractmethod
    def find_columns(self) -> tuple[str, ...]:
        """The columns by which a new row finds the target row that it replaces; empty if new rows are appended."""

    def stored(self, images: pa.Table) -> StoredRows:
        """Return the target's rows that the new rows of the images depend on; no rows if the target is empty."""
        if not images.num_rows or not self.shape.schema.key or not self.target.files()[0]:
            return StoredRows(self.columns.empty_table(), np.zeros(0, bool))
        keys = self.maker.stored_keys(images)
        return self.maker.stored(self._read(keys) if keys.num_rows else self.columns.empty_table())

    def stored_before(self, images: pa.Table) -> StoredRows:
        """Return the target's rows as they were before the changes in `images`.

        images: changes of keys that were parked until this batch.
        """
        return self.stored(images)

    def without_parked(self, stored: StoredRows, parked: Sequence[Key]) -> StoredRows:  # noqa: ARG002 - see MarkedRows
        """Return the stored rows that this batch may change; mode `marked` leaves out the rows of parked keys."""
        return stored

    def not_parked(self, parked: Sequence[Key]) -> str:  # noqa: ARG002 - see MarkedRows
        """Return SQL that is true for the target rows that a truncate or the end of a full copy may close.

        In mode `marked` it is false for the rows of parked keys.
        """
        return "true"

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:  # noqa: ARG002 - see VersionRows and MarkedRows
        """Return column → SQL expression of its new value, for a row that a truncate or the end of a copy closes."""
        return {}

    @abstractmethod
    def _read(self, keys: pa.Table) -> pa.Table:
        """Read the target's rows with the given keys, from which `HistoryRowMaker.stored` makes the states."""

    def _find(self, keys: pa.Table, where: str | None = None) -> pa.Table:
        """Find the target's current rows with the given keys by the index; without an index, scan the target.

        where: SQL condition for the scan, which is true for the current rows; None: the scan reads all rows.
        """
        found = find_by_index(self._find_rows, self.target.table, keys, self.columns)
        return self._scan(keys, where) if found is None else found.combine_chunks()

    def _scan(self, keys: pa.Table, where: str | None = None) -> pa.Table:
        """Scan the target for the rows with the given keys. where: as in `_find`."""
        rows = rows_with_keys(self.target.table, keys, self.columns, where)
        return rows.filter(pa.array(_has_key(rows, keys))).combine_chunks()


class VersionRows(HistoryRows):
    """The rows of mode `versions`: one row for every version of a source row."""

    mode = HistoryMode.VERSIONS
    open_rows = f'"{END_COLUMN}" IS NULL'
    null_column = END_COLUMN

    @property
    def find_columns(self) -> tuple[str, ...]:
        """The key and the position at which the version began."""
        return (*self.shape.key, START_COLUMN)

    def stored_before(self, images: pa.Table) -> StoredRows:
        """Return, for each key of the images, the version that was in force before the first change of the key.

        This version counts as open, even if a truncate or the end of a full copy closed it while the key was parked.
        """
        if not self.target.files()[0]:
            return self.stored(images)
        keys = typed_keys(images["key"], self.shape.schema, self.shape.policy)
        rows = rows_with_keys(self.target.table, keys, self.columns).combine_chunks()
        first = _first_positions(rows, keys, images["position"].to_numpy())
        begun, ended = rows[START_COLUMN].to_numpy(), pc.fill_null(rows[END_COLUMN], _NEVER).to_numpy()
        # a version that ended in the transaction of the first change may continue in that transaction
        rows = rows.filter(pa.array((begun < first) & (first <= ended))).combine_chunks()
        return StoredRows(rows, np.ones(rows.num_rows, bool))

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:
        """See HistoryRows.closing."""
        return {END_COLUMN: str(ending.position), TO_COLUMN: _timestamp(ending)}

    def _read(self, keys: pa.Table) -> pa.Table:
        return self._find(keys, self.open_rows)


class MarkedRows(HistoryRows):
    """The rows of mode `marked`: the latest row of each key, with a mark if the row was deleted."""

    mode = HistoryMode.MARKED
    open_rows = f'NOT "{DELETED_COLUMN}"'

    @property
    def find_columns(self) -> tuple[str, ...]:
        """The key columns."""
        return self.shape.key

    def without_parked(self, stored: StoredRows, parked: Sequence[Key]) -> StoredRows:
        """Return the stored rows without those of parked keys.

        This batch must not mark such a row as deleted. The mark would have a later position than the parked changes,
        which could then not replace the row.
        """
        keys = self._typed_keys(parked)
        if keys is None or not stored.rows.num_rows:
            return stored
        others = ~_has_key(stored.rows, keys)
        return StoredRows(stored.rows.filter(pa.array(others)).combine_chunks(), stored.exists[others])

    def not_parked(self, parked: Sequence[Key]) -> str:
        """Return SQL that is true for target rows whose key is not parked."""
        keys = self._typed_keys(parked)
        if keys is None:
            return "true"
        rows = self._find(keys)
        rows = rows.filter(pa.array(_has_key(rows, keys)))
        moments = zip(rows[POSITION_COLUMN].to_pylist(), rows[ORDINAL_COLUMN].to_pylist(), strict=True)
        listed = ", ".join(f"'{int(position)}/{int(ordinal)}'" for position, ordinal in moments)
        moment = f"concat(CAST({POSITION_COLUMN} AS VARCHAR), '/', CAST({ORDINAL_COLUMN} AS VARCHAR))"
        return f"{moment} NOT IN ({listed})" if listed else "true"

    def closing(self, ending: GenerationEnd) -> Mapping[str, str]:
        """See HistoryRows.closing."""
        moment = {POSITION_COLUMN: str(ending.position), ORDINAL_COLUMN: str(ending.ordinal)}
        return {DELETED_COLUMN: "true", COMMITTED_COLUMN: _timestamp(ending), **moment}

    def _read(self, keys: pa.Table) -> pa.Table:
        return self._find(keys)

    def _typed_keys(self, keys: Sequence[Key]) -> pa.Table | None:
        """Convert keys to typed columns; leave out keys that the target cannot represent. None if no key remains."""
        found = [typed for typed in map(self._typed_key, keys) if typed is not None]
        return pa.concat_tables(found) if found else None

    def _typed_key(self, key: Key) -> pa.Table | None:
        try:
            return typed_keys(pa.array([key], pa.list_(pa.string())), self.shape.schema, self.shape.policy)
        except ValueNotRepresentable:
            return None


class ChangeRows(HistoryRows):
    """The rows of mode `changes`: one appended row for each change, truncate and end of a full copy."""

    mode = HistoryMode.CHANGES
    open_rows = None

    @property
    def find_columns(self) -> tuple[str, ...]:
        """Empty: new rows are appended and replace no row."""
        return ()

    def _read(self, keys: pa.Table) -> pa.Table:
        return self._scan(keys)


ROWS_OF: Final[Mapping[HistoryMode, type[HistoryRows]]] = {
    kind.mode: kind for kind in (VersionRows, MarkedRows, ChangeRows)
}
"""History mode → the class that makes its rows."""


def _timestamp(ending: GenerationEnd) -> str:
    """Return the commit time of a truncate or end of a copy as a SQL expression."""
    return f"arrow_cast({ending.committed_at}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _has_key(rows: pa.Table, keys: pa.Table) -> np.ndarray:
    """Return, as one bool per row, whether the row has one of the keys."""
    return _first_positions(rows, keys, np.zeros(keys.num_rows, np.int64)) == 0


def _first_positions(rows: pa.Table, keys: pa.Table, positions: np.ndarray) -> np.ndarray:
    """Return, for each row, the lowest of the positions given for its key; -1 if `keys` does not contain the key.

    positions: one position for each row of `keys`, which may contain a key more than once.
    """
    names = keys.column_names
    numbers = key_numbers(pa.concat_tables([rows.select(names), keys]))
    first = np.full(int(numbers.max(initial=-1)) + 1, _NEVER)
    np.minimum.at(first, numbers[rows.num_rows :], positions)
    found = first[numbers[: rows.num_rows]]
    return np.where(found == _NEVER, -1, found)
