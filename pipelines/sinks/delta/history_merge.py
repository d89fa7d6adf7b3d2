"""History merge: writes the rows of one batch into one target with history.

An *ending* is a truncate or the end of a full copy. A row is *open* while it exists at the source; an ending closes it.
First, one commit writes the rows that the changes make. Then one commit per ending closes the open rows that are older
than the ending. Each commit can be repeated after a crash. The last commit contains the `txn` of the batch. If endings
follow, the first commit has a `txn` of its own, with the same position. A repeated attempt then does not write the rows
of the first commit again.

A large batch has its changes on Spark's executors (`TableBatch.parts`), which make and write the rows of the first
commit (executor_history.py). The changes of a small batch are in the memory of this process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa

from cdc.errors import HistoryTrimmed, MissingBase
from cdc.failpoint import hit
from cdc.position import Position
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.history_changes import GenerationEnd
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import ROWS, DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_history import ExecutorHistory
from pipelines.sinks.delta.history_modes import HistoryRows
from pipelines.sinks.delta.history_row_maker import changes_to_merge
from pipelines.sinks.delta.history_rows import StoredRows
from pipelines.sinks.delta.target_columns import OP
from pipelines.sinks.delta.target_layout import check_partition_values, double_quoted
from pipelines.sinks.delta.writers import Writers


@dataclass(frozen=True, slots=True)
class HistoryMerge:
    """Merges one batch into one target with history."""

    rows: HistoryRows
    writers: Writers

    @property
    def target(self) -> DeltaTarget:
        """The target that receives the rows."""
        return self.rows.target

    def apply(self, batch: TableBatch) -> None:
        """Merge a batch whose rows are single changes, as pipelines.folding.history_changes returns them.

        Raises MissingBase for a partial image without a base row, and ValueNotRepresentable for a value that the target
        cannot represent. Raises HistoryTrimmed if single changes after the target's position were trimmed.
        """
        images, done = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows, self.target.changed_upto
        self._check_not_trimmed(batch, images, done)
        endings = sorted(batch.endings)
        images = changes_to_merge(images, done, batch.since)
        stored = self.rows.without_parked(self.rows.stored(images), batch.parked_keys)
        rows, known = self._new_rows(batch, images, stored, done), stored.rows.num_rows
        if batch.unparked is not None and done < batch.upto:
            # if `done` is not below upto, an attempt before a crash has committed these rows already
            earlier = self.rows.without_parked(self.rows.stored_before(batch.unparked), batch.parked_keys)
            with_endings = replace(batch, endings=(*batch.earlier_endings, *batch.endings))
            rows = pa.concat_tables([rows, self._new_rows(with_endings, batch.unparked, earlier, batch.upto)])
            known += earlier.rows.num_rows
        closes = self.rows.open_rows is not None and len(endings) > 0 and self.target.files()[0] > 0
        if batch.generation is not None:
            self.target.complete_generation(batch.generation)
        hit("delta_before_merge")
        executors = ExecutorHistory.of(self.rows, batch, done)
        marker = TxnMarker(self.target.app_id + (ROWS if closes else ""), batch.upto)
        if executors is not None:
            self._write_parts(batch, executors, rows, marker)
        elif rows.num_rows:
            # if the target has none of the keys, every row is new
            self._write(batch, rows, self.rows.find_columns if known else (), marker)
        hit("delta_after_merge")
        if closes:
            self._close(endings, batch)

    def _check_not_trimmed(self, batch: TableBatch, images: pa.Table, done: int) -> None:
        if not batch.since:
            return

        def is_trimmed(rows: pa.Table) -> bool:
            positions = rows["position"].to_numpy()
            return bool(((positions > done) & (positions <= batch.since)).any())

        if done > 0 and (
            is_trimmed(images)
            or any(done < ending.position <= batch.since for ending in batch.endings)
            or (batch.parts is not None and batch.parts.has_any(is_trimmed))
        ):
            raise HistoryTrimmed(
                f"target {self.target.uri!r} needs every single change after {Position(done)!s}, but the log contains "
                f"single changes only after {Position(batch.since)!s}"
            )

    def _new_rows(self, batch: TableBatch, images: pa.Table, stored: StoredRows, done: int) -> pa.Table:
        added = [ending for ending in batch.endings if ending.position > done]
        return self.rows.maker.new_rows(images, stored, batch.endings, added)

    def _write_parts(self, batch: TableBatch, executors: ExecutorHistory, rows: pa.Table, marker: TxnMarker) -> None:
        """Let executors write the new rows of the changes that they have. rows: the new rows on the driver."""
        check_partition_values(rows, self.rows.shape.partition_texts, batch.schema.topic)
        try:
            if executors.can_write_files():
                executors.write_files(rows, marker)
                return
            find_columns = self.rows.find_columns if executors.finds_rows else ()
            source = executors.source(rows)
            writer = self.writers.choose(self.target, batch, source, find_columns)
            with raising_task_errors():
                self.writers.merge(self.target, source, find_columns, marker, writer)
        except MissingBase as exc:  # a task counts only the images of its part
            raise executors.missing_base() or exc from exc

    def _write(self, batch: TableBatch, rows: pa.Table, find_columns: tuple[str, ...], marker: TxnMarker) -> None:
        source = rows.append_column(OP, pa.repeat(pa.scalar("u"), rows.num_rows)) if find_columns else rows
        check_partition_values(source, self.rows.shape.partition_texts, batch.schema.topic)
        writer = self.writers.choose(self.target, batch, source, find_columns)
        self.writers.merge(self.target, source, find_columns, marker, writer)

    def _close(self, endings: Sequence[GenerationEnd], batch: TableBatch) -> None:
        """Close the open rows that the truncates and ends of full copies of a batch remove, in one commit per ending.

        endings: these truncates and ends of copies, sorted. The last commit contains the `txn` of the batch.
        """
        not_parked = self.rows.not_parked(batch.parked_keys)
        for ending in endings:
            last = ending is endings[-1]
            marker = TxnMarker(self.target.app_id, batch.upto).properties if last else self.target.signed_commit
            closing = self.rows.closing(ending)
            self.target.table.update(
                updates={double_quoted(name): expression for name, expression in closing.items()},
                predicate=f"{self.rows.open_rows} AND ({_older(ending)}) AND {not_parked}",
                commit_properties=marker,
            )
            hit("delta_after_ending")


def _older(ending: GenerationEnd) -> str:
    """Return SQL that is true for target rows older than a truncate, or than the start of a full copy that has ended.

    It is also true for rows without a position, which another client wrote.
    """
    unpositioned = f"{POSITION_COLUMN} IS NULL"
    if ending.began is not None:
        return f"{unpositioned} OR {POSITION_COLUMN} < {int(ending.began)}"
    position, ordinal = int(ending.position), int(ending.ordinal)
    within = f"{POSITION_COLUMN} = {position} AND {ORDINAL_COLUMN} < {ordinal}"
    return f"{unpositioned} OR {POSITION_COLUMN} < {position} OR ({within})"
