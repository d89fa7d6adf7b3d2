"""Targets that keep more of a row than its latest state: versions, marked rows, every change.

Order inside `bring`: look up the rows that the range builds on, make from them and the changes the rows of the mode,
and put those in the target whole, in one commit; then close, or mark, the rows that truncates and generations ended and
that the range did not touch. Each of the two can be done again: the first carries a `txn` of its own where the second
follows, and changes up to there are passed over; the second finds only rows that are still open. Where nothing ended,
the first carries the `txn` of the range.

Honest ceiling: the changes of one batch are in this process at once, and of one transaction always.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import structlog
from deltalake import CommitProperties, Transaction

from cdc.config import TableSettings
from cdc.config.sinks import HistoryMode
from cdc.errors import HistoryTrimmed, ValueNotRepresentable
from cdc.failpoint import hit
from cdc.naming import (
    COMMITTED_COLUMN,
    DELETED_COLUMN,
    END_COLUMN,
    OP_COLUMN,
    ORDINAL_COLUMN,
    POSITION_COLUMN,
    START_COLUMN,
    TO_COLUMN,
)
from cdc.position import Position
from cdc.stores.dead_letter_rows import Key
from cdc.table import Column, TableSchema
from pipelines.folding.every_change import GenerationEnd
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.base_lookup import rows_with
from pipelines.sinks.delta.columns import tracked
from pipelines.sinks.delta.key_equality import latest, numbered
from pipelines.sinks.delta.merge import OP, ROWS, TxnMarker, double_quoted
from pipelines.sinks.delta.merge_source import RowShape
from pipelines.sinks.delta.row_states import StoredState, states
from pipelines.sinks.delta.schema_evolution import column_id, only_in
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.versions import ADDED, changes, marked, versions
from pipelines.types.rows import typed_keys

_OPEN: Final = {
    HistoryMode.VERSIONS: f"{double_quoted(END_COLUMN)} IS NULL",
    HistoryMode.MARKED: f"NOT {double_quoted(DELETED_COLUMN)}",
}
"""Which rows are there at the source."""

OLDER: Final = "/older/"
"""Behind a target's `txn` identity, with the id of a column: up to where rows are older than the column."""
_NEVER: Final = int(np.iinfo(np.int64).max)

Write = Callable[[pa.Table, tuple[str, ...], TxnMarker], None]
"""Merges rows, with the `_op` of a merge, by columns that find one; without such columns appends them as they are."""

log = structlog.get_logger("apply")


def all_columns(shape: RowShape, keeping: HistoryMode) -> pa.Schema:
    """All columns of a target."""
    return pa.schema([*shape.columns, *ADDED[keeping]])


def since_copied(batch: TableBatch, before: TableSchema | None) -> TableBatch:
    """The batch without changes from before a full copy under another key: no row is found by theirs any more.

    before: the table when it was last published. What the target has of such rows ends with the copy.
    """
    if batch.rows is None or not batch.copied:
        return batch
    ids = [column.id for column in batch.schema.key]
    same = before is None or [column.id for column in before.key] == ids
    if same and pc.all(pc.equal(pc.list_value_length(batch.rows["key"]), len(ids)), min_count=0).as_py():
        return batch
    rows = batch.rows.filter(pc.greater_equal(batch.rows["position"], batch.generation))
    if left := batch.rows.num_rows - rows.num_rows:
        log.warning("changes under another key are not kept", table=batch.schema.topic, changes=left)
    return replace(batch, rows=rows)


def changed_upto(target: DeltaTarget) -> int:
    """The position up to which the changes are in the target, perhaps without what truncates ended there."""
    return max(target.applied or 0, target.transaction(ROWS) or 0)


def first_columns(target: DeltaTarget, schema: TableSchema) -> list[Column]:
    """The columns that no row of the target is older than, as far as its own notes tell."""
    if not changed_upto(target):
        return list(schema.columns)
    fields = {column_id(field): field for field in target.columns}
    there = [(column, fields.get(str(column.id).encode())) for column in schema.columns]
    return [c for c, field in there if field is not None and target.transaction(_older_than(field)) is None]


def note_older(target: DeltaTarget, columns: pa.Schema, names: Collection[str]) -> None:
    """Note up to where the rows are older than the columns of these names, before the target has them."""
    there, stands = {column_id(field) for field in target.columns}, changed_upto(target)
    new = [_older_than(columns.field(name)) for name in names if column_id(columns.field(name)) not in there]
    if stands:
        _note(target, new, stands)


def note_before(target: DeltaTarget, columns: pa.Schema, upto: int) -> None:
    """Note that the rows up to there are older than columns which the target has, and not they, from before a crash."""
    _note(target, [OLDER + column.decode() for column in sorted(only_in(target.columns, columns))], upto)


def _note(target: DeltaTarget, suffixes: Sequence[str], upto: int) -> None:
    if suffixes:
        marks = CommitProperties(app_transactions=[Transaction(target.app_id + suffix, upto) for suffix in suffixes])
        target.table.create_write_transaction([], "append", target.table.schema(), commit_properties=marks)
        target.refresh()


def refill(target: DeltaTarget, defaults: Mapping[str, str], keeping: HistoryMode) -> None:
    """Give the rows that were noted as older the defaults of new columns: Delta column → SQL expression.

    Rows of deletes do not say them. Younger ones, perhaps of an attempt before a crash, hold their own values.
    """
    images = f" AND {OP_COLUMN} IN ('c', 'u', 'r')" if keeping is HistoryMode.CHANGES else ""
    for name, expression in defaults.items():
        older = target.transaction(_older_than(target.columns.field(name)))
        if older is not None and target.files()[0]:
            target.table.update(
                updates={double_quoted(name): expression},
                predicate=f"{POSITION_COLUMN} <= {older}{images}",
                commit_properties=target.signed,
            )


def _older_than(field: pa.Field) -> str:
    return OLDER + (column_id(field) or b"").decode()


@dataclass(frozen=True, slots=True)
class HistoryTarget:
    """One target for the length of one batch."""

    target: DeltaTarget
    shape: RowShape
    settings: TableSettings
    write: Write

    def bring(self, batch: TableBatch) -> None:
        """Bring the target to batch.upto; the batch's rows are changes, as pipelines.folding.every_change has them.

        Raises MissingBase and ValueNotRepresentable as states does, and HistoryTrimmed for a target whose
        changes the log has no more one by one.
        """
        images, done = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows, changed_upto(self.target)
        self._check_told(batch, images, done)
        endings = sorted(batch.endings)
        images = _begun(images.filter(pc.greater(images["position"], done)), batch.since)
        held = self._without(self._held(images), batch.waiting)
        rows, known = self._rows(batch, images, held, done), held.rows.num_rows
        if batch.again is not None and done < batch.upto:
            # else the first of the two commits was made before, with them
            waited = self._without(self._held_before(batch.again), batch.waiting)
            said = replace(batch, endings=(*batch.ended, *batch.endings))
            rows = pa.concat_tables([rows, self._rows(said, batch.again, waited, batch.upto)])
            known += waited.rows.num_rows
        closes = self._keeping is not HistoryMode.CHANGES and len(endings) > 0 and self.target.files()[0] > 0
        if batch.generation is not None:
            self.target.complete_generation(batch.generation)
        hit("delta_before_merge")
        if rows.num_rows:
            suffix = ROWS if closes else ""
            # of keys that the target does not have every row is new
            finds = self._finds if known else ()
            found = rows.append_column(OP, pa.repeat(pa.scalar("u"), rows.num_rows)) if finds else rows
            self.write(found, finds, TxnMarker(self.target.app_id + suffix, batch.upto))
        hit("delta_after_merge")
        if closes:
            self._close(endings, batch)

    @property
    def _keeping(self) -> HistoryMode:
        return self.settings.keeping

    @property
    def _finds(self) -> tuple[str, ...]:
        if self._keeping is HistoryMode.CHANGES:
            return ()
        return (*self.shape.key, START_COLUMN) if self._keeping is HistoryMode.VERSIONS else self.shape.key

    def _check_told(self, batch: TableBatch, images: pa.Table, done: int) -> None:
        places = (
            [*images["position"].to_pylist(), *(ending.position for ending in batch.endings)] if batch.since else []
        )
        if done > 0 and any(done < place <= batch.since for place in places):
            raise HistoryTrimmed(
                f"target {self.target.uri!r} stands at {Position(done)!s}, and every single change is in the log "
                f"from {Position(batch.since)!s} on only"
            )

    def _rows(self, batch: TableBatch, images: pa.Table, held: StoredState, done: int) -> pa.Table:
        """What images add to the target and what of it they change, whole; endings up to `done` are in it."""
        there = states(images, held, batch.endings, self.shape)
        if self._keeping is HistoryMode.VERSIONS:
            return versions(there, held, tracked(self.shape, batch.schema, self.settings))
        if self._keeping is HistoryMode.MARKED:
            return marked(there)
        return changes(there, images["op"], [ending for ending in batch.endings if ending.position > done])

    def _held(self, images: pa.Table) -> StoredState:
        """The rows that the images build on: of each key, or where every change is kept, of those of partial images."""
        columns = all_columns(self.shape, self._keeping)
        if self._keeping is HistoryMode.CHANGES:
            images = images.filter(pc.invert(pc.fill_null(images["complete"], fill_value=True)))
        if not images.num_rows or not self.shape.schema.key or not self.target.files()[0]:
            return StoredState(columns.empty_table(), np.zeros(0, bool))
        named = pa.chunked_array([*images["key"].chunks, *images["base"].drop_null().chunks])
        keys = typed_keys(named, self.shape.schema, self.shape.policy)
        where = _OPEN[HistoryMode.VERSIONS] if self._keeping is HistoryMode.VERSIONS else None
        rows = rows_with(self.target.table, keys, columns, where).combine_chunks()
        if self._keeping is HistoryMode.CHANGES:
            rows = latest(rows.filter(pc.is_in(rows[OP_COLUMN], pa.array(["c", "d", "r", "u"]))), self.shape.key)
            return StoredState(rows, pc.not_equal(rows[OP_COLUMN], "d").to_numpy())
        alive = np.ones(rows.num_rows, bool)
        return StoredState(rows, ~rows[DELETED_COLUMN].to_numpy() if self._keeping is HistoryMode.MARKED else alive)

    def _held_before(self, images: pa.Table) -> StoredState:
        """The rows that changes of keys build on that were parked: of each key the one before its first change.

        An ending that came since has closed that version, as if nothing had been between.
        """
        if self._keeping is not HistoryMode.VERSIONS or not self.target.files()[0]:
            return self._held(images)
        keys = typed_keys(images["key"], self.shape.schema, self.shape.policy)
        rows = rows_with(self.target.table, keys, all_columns(self.shape, self._keeping)).combine_chunks()
        first = _first_of(rows, keys, images["position"].to_numpy())
        begun, ended = rows[START_COLUMN].to_numpy(), pc.fill_null(rows[END_COLUMN], _NEVER).to_numpy()
        # what ended in the transaction of the first change may go on in it
        rows = rows.filter(pa.array((begun < first) & (first <= ended))).combine_chunks()
        return StoredState(rows, np.ones(rows.num_rows, bool))

    def _close(self, endings: Sequence[GenerationEnd], batch: TableBatch) -> None:
        """Close, or mark, in the target what each ending took away, the last one with the `txn`."""
        others = self._other_rows(batch.waiting)
        for ending in endings:
            last = ending is endings[-1]
            mark = TxnMarker(self.target.app_id, batch.upto).properties if last else self.target.signed
            self.target.table.update(
                updates=_closed(ending, self._keeping),
                predicate=f"{_OPEN[self._keeping]} AND ({_older(ending)}) AND {others}",
                commit_properties=mark,
            )
            hit("delta_after_ending")

    def _without(self, held: StoredState, waiting: Sequence[Key]) -> StoredState:
        """The rows that may be marked: not those of parked keys, for a mark is later than what is still to come."""
        keys = self._typed_keys(waiting) if self._keeping is HistoryMode.MARKED else None
        if keys is None or not held.rows.num_rows:
            return held
        others = ~_among(held.rows, keys)
        return StoredState(held.rows.filter(pa.array(others)).combine_chunks(), held.alive[others])

    def _other_rows(self, waiting: Sequence[Key]) -> str:
        """SQL that is true for the rows of `_without`."""
        keys = self._typed_keys(waiting) if self._keeping is HistoryMode.MARKED else None
        if keys is None:
            return "true"
        rows = rows_with(self.target.table, keys, all_columns(self.shape, self._keeping)).combine_chunks()
        rows = rows.filter(pa.array(_among(rows, keys)))
        places = zip(rows[POSITION_COLUMN].to_pylist(), rows[ORDINAL_COLUMN].to_pylist(), strict=True)
        named = ", ".join(f"'{int(position)}/{int(ordinal)}'" for position, ordinal in places)
        place = f"concat(CAST({POSITION_COLUMN} AS VARCHAR), '/', CAST({ORDINAL_COLUMN} AS VARCHAR))"
        return f"{place} NOT IN ({named})" if named else "true"

    def _typed_keys(self, keys: Sequence[Key]) -> pa.Table | None:
        """Keys as columns, but for those that the target cannot hold, so that it has no row of them; None: none."""
        found = [typed for typed in map(self._typed_key, keys) if typed is not None]
        return pa.concat_tables(found) if found else None

    def _typed_key(self, key: Key) -> pa.Table | None:
        try:
            return typed_keys(pa.array([key], pa.list_(pa.string())), self.shape.schema, self.shape.policy)
        except ValueNotRepresentable:
            return None


def _begun(images: pa.Table, since: int) -> pa.Table:
    """Without the deletes that came before the history begins."""
    earlier = pc.and_(pc.less_equal(images["position"], since), pc.equal(images["op"], "d"))
    return images.filter(pc.invert(earlier))


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


def _closed(ending: GenerationEnd, keeping: HistoryMode) -> dict[str, str]:
    time = f"arrow_cast({ending.committed_at}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
    if keeping is HistoryMode.VERSIONS:
        said = {END_COLUMN: str(ending.position), TO_COLUMN: time}
    else:
        place = {POSITION_COLUMN: str(ending.position), ORDINAL_COLUMN: str(ending.ordinal)}
        said = {DELETED_COLUMN: "true", COMMITTED_COLUMN: time, **place}
    return {double_quoted(name): expression for name, expression in said.items()}


def _older(ending: GenerationEnd) -> str:
    """SQL that is true for the rows that it took away, and for those that another hand put there without a place."""
    placeless = f"{POSITION_COLUMN} IS NULL"
    if ending.began is not None:
        return f"{placeless} OR {POSITION_COLUMN} < {int(ending.began)}"
    position, ordinal = int(ending.position), int(ending.ordinal)
    within = f"{POSITION_COLUMN} = {position} AND {ORDINAL_COLUMN} < {ordinal}"
    return f"{placeless} OR {POSITION_COLUMN} < {position} OR ({within})"
