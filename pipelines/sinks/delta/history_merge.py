"""History merge: the rows of one batch written to one target with history.

Order of the commits: first the rows that the changes make, whole and in one commit; then one commit for each ending
(truncate or end of a copy), which closes the rows that the range did not touch. Each can be repeated. The first
carries a `txn` of its own where others follow, and a repeated attempt skips changes up to there; the others find only
rows that are still open. The last commit carries the `txn` of the range.

Honest ceiling: the changes of one batch are in the memory of this process at once, and those of one transaction always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import HistoryTrimmed
from cdc.failpoint import hit
from cdc.position import Position
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.every_change import GenerationEnd
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.history_modes import HistoryRows
from pipelines.sinks.delta.merge import OP, TxnMarker, double_quoted
from pipelines.sinks.delta.partition_values import check_partition_values
from pipelines.sinks.delta.row_states import StoredState, row_states
from pipelines.sinks.delta.table import ROWS, DeltaTarget
from pipelines.sinks.delta.writers import Writers


@dataclass(frozen=True, slots=True)
class HistoryMerge:
    """The merge of one batch."""

    rows: HistoryRows
    writers: Writers

    @property
    def target(self) -> DeltaTarget:
        """The target of the rows."""
        return self.rows.target

    def apply(self, batch: TableBatch) -> None:
        """Merge a batch; its rows are single changes, as pipelines.folding.every_change makes them.

        Raises MissingBase and ValueNotRepresentable as states does, and HistoryTrimmed for a target whose changes
        the log has no longer one by one.
        """
        images, done = FOLDED_ARROW.empty_table() if batch.rows is None else batch.rows, self.target.changed_upto
        self._check_not_trimmed(batch, images, done)
        endings = sorted(batch.endings)
        images = _without_earlier_deletes(images.filter(pc.greater(images["position"], done)), batch.since)
        stored = self.rows.without_parked(self.rows.stored(images), batch.parked_keys)
        rows, known = self._new_rows(batch, images, stored, done), stored.rows.num_rows
        if batch.unparked is not None and done < batch.upto:
            # else an attempt before a crash committed them with the changes
            earlier = self.rows.without_parked(self.rows.stored_before(batch.unparked), batch.parked_keys)
            with_endings = replace(batch, endings=(*batch.earlier_endings, *batch.endings))
            rows = pa.concat_tables([rows, self._new_rows(with_endings, batch.unparked, earlier, batch.upto)])
            known += earlier.rows.num_rows
        closes = self.rows.open_rows is not None and len(endings) > 0 and self.target.files()[0] > 0
        if batch.generation is not None:
            self.target.complete_generation(batch.generation)
        hit("delta_before_merge")
        if rows.num_rows:
            # where the target has none of the keys, every row is new
            self._write(batch, rows, self.rows.find_columns if known else (), ROWS if closes else "")
        hit("delta_after_merge")
        if closes:
            self._close(endings, batch)

    def _check_not_trimmed(self, batch: TableBatch, images: pa.Table, done: int) -> None:
        if not batch.since:
            return
        positions = [*images["position"].to_pylist(), *(ending.position for ending in batch.endings)]
        if done > 0 and any(done < position <= batch.since for position in positions):
            raise HistoryTrimmed(
                f"target {self.target.uri!r} is at {Position(done)!s}, but the log contains every single change only "
                f"from {Position(batch.since)!s} on"
            )

    def _new_rows(self, batch: TableBatch, images: pa.Table, stored: StoredState, done: int) -> pa.Table:
        there = row_states(images, stored, batch.endings, self.rows.shape)
        return self.rows.new_rows(there, stored, batch, images, done)

    def _write(self, batch: TableBatch, rows: pa.Table, finds: tuple[str, ...], suffix: str) -> None:
        source = rows.append_column(OP, pa.repeat(pa.scalar("u"), rows.num_rows)) if finds else rows
        check_partition_values(source, self.rows.shape.parted, batch.schema.topic)
        choice = self.writers.choice(self.target, batch, source, finds)
        marker = TxnMarker(self.target.app_id + suffix, batch.upto)
        self.writers.merge(self.target, source, finds, marker, choice)

    def _close(self, endings: Sequence[GenerationEnd], batch: TableBatch) -> None:
        """Close the rows that each ending took away; the last commit carries the `txn`."""
        others = self.rows.not_parked(batch.parked_keys)
        for ending in endings:
            last = ending is endings[-1]
            marker = TxnMarker(self.target.app_id, batch.upto).properties if last else self.target.signed_commit
            closing = self.rows.closing(ending)
            self.target.table.update(
                updates={double_quoted(name): expression for name, expression in closing.items()},
                predicate=f"{self.rows.open_rows} AND ({_older(ending)}) AND {others}",
                commit_properties=marker,
            )
            hit("delta_after_ending")


def _without_earlier_deletes(images: pa.Table, since: int) -> pa.Table:
    """The images without the deletes from before the history begins."""
    earlier = pc.and_(pc.less_equal(images["position"], since), pc.equal(images["op"], "d"))
    return images.filter(pc.invert(earlier))


def _older(ending: GenerationEnd) -> str:
    """SQL that is true for rows older than the ending, and for rows of another client, which have no position."""
    placeless = f"{POSITION_COLUMN} IS NULL"
    if ending.began is not None:
        return f"{placeless} OR {POSITION_COLUMN} < {int(ending.began)}"
    position, ordinal = int(ending.position), int(ending.ordinal)
    within = f"{POSITION_COLUMN} = {position} AND {ORDINAL_COLUMN} < {ordinal}"
    return f"{placeless} OR {POSITION_COLUMN} < {position} OR ({within})"
