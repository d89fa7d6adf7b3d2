"""Sink: the contract between the apply loop and a derived store, and the values that cross it.

Theory. The loop cuts the log into ranges (after, upto], folds each to the latest state per key and
hands every table its part. A sink **applies** table by table and then **publishes** one record of
where all tables stand. Applied is not published: what apply did is durable in the target, but no
promise rests on it until publish returned; progress moves on published alone.

Honest ceiling: a target is effectively once. A process may die anywhere and the same range then comes
again, cut in the same or in another place; it must leave the same target. Order comes from
(position, ordinal) of each row, never from the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import pyarrow as pa

from cdc.config import DeadLetterSettings
from cdc.errors import CdcError
from cdc.stores.dead_letter_rows import DeadLetterEntry, Image, Key, ParkedRow
from cdc.stores.published import Published, TableRecord, TargetState
from cdc.table import TableSchema, TableState
from pipelines.folding.every_change import GenerationEnd

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "NONE_PARKED",
    "ParkedRows",
    "ParkingSink",
    "Published",
    "RefusedRow",
    "Sink",
    "SparkAwaited",
    "TableBatch",
    "TableRecord",
    "TargetState",
]

ImageMask = Callable[[Image], Image]
"""Makes of a row image what may be stored next to a target: only its columns, masked as they are there."""

NONE_PARKED: Final = DeadLetterSettings(stop_at=0)
"""Of a table that stops at the first row it cannot take."""


@dataclass(frozen=True, slots=True)
class TableBatch:
    """What the range (after, upto] did to one relation: at most one folded row per key.

    Rows come in one of two forms, or not at all when only control rows fell into the range:
    `rows` on the driver (pipelines.folding.fold.FOLDED_ARROW, op `u` and `d` only), or `frame`, the same not collected,
    for a batch too large for the driver. Never both. Of a table whose target keeps more than the latest state `rows`
    are all its changes, as pipelines.folding.every_change has them.
    """

    schema: TableSchema
    """The version in force at upto."""
    rows: pa.Table | None
    frame: DataFrame | None
    after: int
    """Position, exclusive; the loop guarantees that the target was offered everything up to it."""
    upto: int
    """Position, inclusive."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate in the range: every older row of the target is gone."""
    generation: int | None = None
    """B of the last generation end in the range: every row of the target older than B is gone."""
    endings: tuple[GenerationEnd, ...] = ()
    """Every truncate and generation end of the range in order; for targets that keep more than the latest state."""
    since: int = 0
    """For such targets: up to this position the rows are what the changes come to, not the single changes."""
    unparked: pa.Table | None = None
    """For such targets: the changes of keys that waited and do no more, in order of each key; in `rows` none is."""
    earlier_endings: tuple[GenerationEnd, ...] = ()
    """What ended rows of these keys before the range."""
    parked_keys: tuple[Key, ...] = ()
    """For such targets: the keys that are parked at the end of the range; what ends rows is noted with them."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.frame is not None:
            raise ValueError(f"batch of {self.schema.topic!r} has rows and a frame: expected one of them")
        if self.after > self.upto:
            raise ValueError(f"batch of {self.schema.topic!r} ends before it begins")

    @property
    def is_copying(self) -> bool:
        """Whether a full copy of the table is on its way at upto.

        The row of a partial image may then not have been read yet, wherever it lies; it comes before the copy ends.
        """
        return self.schema.state is TableState.SNAPSHOTTING

    @property
    def ends_copy(self) -> bool:
        """Whether a full copy of the table, as it is at upto, ended in the range: every row of the target goes."""
        return self.generation is not None and not self.is_copying


class SparkAwaited(Exception):
    """A batch needs Spark and Spark is not up yet; nothing of it was published, and it will come again."""


class Sink(Protocol):
    """A derived store of one source.

    Called by one driver: `open` once and first, then any number of rounds of `apply` (once per table
    that the range touched, in any order, from up to `parallel` threads, never two for one table) and one
    `publish` when all of them returned; `keep` and `release` between rounds; `close` once and last,
    also after a failure. Nothing may be assumed about calls after a crash but that `open` is the first.
    """

    name: str
    """As the definition calls it; labels metrics and messages."""
    parallel: int
    """How many tables may be applied at once; 1 where the engine has one writer."""

    def open(self, log_id: str) -> Published | None:
        """Attach to the store and return its published record, None when nothing was ever published.

        The store is claimed for log_id. Raises SinkOfAnotherLog when it holds another log's rows,
        SinkUnavailable (retried) when it does not answer.
        """

    def attach(self, spark: SparkSession) -> None:
        """Spark is up; called between rounds, or before `open`, and perhaps again.

        Until then batches come as `rows` only, and one that cannot be applied without Spark raises SparkAwaited.
        """

    def apply(self, batch: TableBatch) -> TableRecord:
        """Bring one table's target to batch.upto and return where it stands.

        Idempotent: a target already at or beyond upto is left alone; truncates and generation ends remove only
        rows older than themselves; a row is replaced only by a later (position, ordinal); a batch
        interrupted half-way is done again from its start. Durable only once publish returned.

        Errors with the reaction QUARANTINE concern this table alone (a value that does not fit, a missing base, a
        schema change that cannot be followed): the target then stands where it stood, the loop
        records it as failed and goes on with the others. Any other error stops the sink.

        While `batch.is_copying`, a partial image whose base the target does not have makes no row and is no error;
        everything else of it counts, such as the delete of the key that it came from.

        The state is SNAPSHOTTING while a full copy is on its way and until a generation end closed it, then
        STREAMING; never FAILED.
        """

    def publish(self, record: Published) -> None:
        """Make the cut visible in one atomic write; when it returns the cut is durable.

        `record.tables` holds every table of the sink, also those the range did not touch. Such a table stands at
        the new position without a commit of its own: the record is the truth about positions, the
        mark inside a target only keeps a range from being merged twice. Raises SinkFenced when another driver
        published since this one opened or last published; nothing was then written.
        """

    def pin(self, record: Published) -> str:
        """Make the cut of a published record readable for later; returns its handle.

        Delta: JSON of target → version; search: the path of a copy.
        """

    def release(self, handle: str) -> None:
        """Give back what keep took; an unknown handle is ignored."""

    def close(self) -> None:
        """Let go of connections and files; publishes nothing."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """One row of a batch that a target cannot take."""

    row: int
    """Its place among the batch's rows."""
    error: CdcError


class ParkedRows(Protocol):
    """The rows that a sink keeps beside itself because its targets cannot take them; of one driver."""

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """What is parked of a table where its target stands."""

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Keep what a batch parks and lets go, in one commit, in the place of all entries behind `after`.

        Durable when it returns, unless nothing of the batch is durable before `publish` and both are then written by
        one commit; it counts once the target has come to the end of the batch. Called before each merge, also
        without entries: then only what an attempt left that failed is taken away.
        """

    def confirm(self, relation: int, held: Mapping[Key, ParkedRow]) -> None:
        """The batch was merged: this is parked now."""


@runtime_checkable
class ParkingSink(Sink, Protocol):
    """A sink that can set single rows aside."""

    @property
    def parked(self) -> ParkedRows:
        """Once it is open."""

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """How much of a table may be parked; `stop_at` is 0 if a row that fails stops the table."""

    def target_position(self, schema: TableSchema) -> int:
        """Where the target of a table stands; what is parked of one that was never published is read as of there."""

    def image_mask(self, schema: TableSchema) -> Callable[[Image], Image]:
        """What makes of an image what may lie beside the target: nothing that is not in it, masked as it is there."""

    def keeps_history(self, schema: TableSchema) -> bool:
        """Whether the target keeps more of a row than its latest state, so that no change of a key may be left out."""

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """The rows of a batch that `apply` would fail for, not many more than `limit` of them; changes nothing.

        Of a target that keeps every change these are only those with a value that it cannot hold; after the rows of
        the batch those of `again` are counted on, and one that fails there stands for its key.
        """
