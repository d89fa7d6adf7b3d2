"""Sink contract: what the apply loop asks of a derived store, and the values that cross between them.

Theory. The loop cuts the log into ranges (after, upto], folds each to the latest state per key, and gives every table
its part. A sink **applies** table by table, then **publishes** one record of the position of every table. Applied is
not published: what `apply` did is durable in the target, but readers and progress rely only on what `publish` returned.

Honest ceiling: a target is effectively once. A process may die at any point. The same range then comes again, cut at
the same or at another position, and must leave the same target. Order comes from the (position, ordinal) of each row,
never from the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import pyarrow as pa

from cdc.config import DeadLetterSettings
from cdc.errors import CdcError
from cdc.stores.dead_letter_rows import DeadLetterEntry, Image, Key, ParkedRow
from cdc.stores.published_record import Published, TableRecord, TargetState
from cdc.table import TableSchema, TableState
from pipelines.folding.every_change import GenerationEnd

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "NONE_PARKED",
    "DeadLetterSettings",
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
"""A function that converts a row image: it keeps only the columns of the target, masked as in the target."""

NONE_PARKED: Final = DeadLetterSettings(stop_at=0)
"""The limits of a table that stops at the first row that its target refuses."""


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The changes of the range (after, upto] to one relation: at most one folded row per key.

    Rows come in one of two forms, never in both: `rows` on the driver (pipelines.folding.fold.FOLDED_ARROW, op `u` and
    `d` only), or `frame`, the same rows on the executors, for a batch that is too large for the driver. A range with
    control rows only has neither. For a target with history, `rows` are all changes, as
    pipelines.folding.every_change makes them.
    """

    schema: TableSchema
    """The version of the table at upto."""
    rows: pa.Table | None
    frame: DataFrame | None
    after: int
    """Position after which the range begins; earlier batches have passed everything up to it to the target."""
    upto: int
    """Position at which the range ends; the range includes it."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate in the range, which removes every older row; None if there is none."""
    generation: int | None = None
    """Start position of the last full copy that ended in the range, which removes every older row; None if none did."""
    endings: tuple[GenerationEnd, ...] = ()
    """Targets with history only: every truncate and end of a full copy in the range, by position."""
    since: int = 0
    """Targets with history only: up to this position the log has no single changes; 0: it has every change."""
    unparked: pa.Table | None = None
    """Targets with history only: the changes of keys that are no longer parked; `rows` does not contain them."""
    earlier_endings: tuple[GenerationEnd, ...] = ()
    """Truncates and ends of full copies before the range that apply to the keys of `unparked`."""
    parked_keys: tuple[Key, ...] = ()
    """Targets with history only: the keys that are parked at the end of the range."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.frame is not None:
            raise ValueError(f"batch of {self.schema.topic!r} has both rows and a frame: expected one of the two")
        if self.after > self.upto:
            raise ValueError(f"batch of {self.schema.topic!r} ends before it begins")

    @property
    def is_copying(self) -> bool:
        """Whether a full copy of the table is running at upto.

        The base row of a partial image may then not be copied yet; it arrives before the copy ends.
        """
        return self.schema.state is TableState.SNAPSHOTTING

    @property
    def ends_copy(self) -> bool:
        """Whether a full copy of the table as of upto ended in the range; it replaces every row of the target."""
        return self.generation is not None and not self.is_copying


class SparkAwaited(Exception):
    """A batch needs Spark, which has not started yet; the loop applies the batch again later."""


class Sink(Protocol):
    """A derived store of one source.

    Called by one driver: `open` once and first, then any number of rounds of `apply` (once per table
    that the range touched, in any order, from up to `parallel` threads, never two for one table) and one
    `publish` when all of them returned; `pin` and `release` between rounds; `close` once and last,
    also after a failure. After a crash the only guarantee is that `open` is the first call.
    """

    name: str
    """The name in the definition; labels metrics and messages."""
    parallel: int
    """Number of tables that may be applied at once; 1 where the engine has one writer."""

    def open(self, log_id: str) -> Published | None:
        """Attach to the store and return its published record, None when nothing was ever published.

        The store is claimed for log_id. Raises SinkOfAnotherLog if it has rows of another log,
        SinkUnavailable (retried) when it does not answer.
        """

    def attach(self, spark: SparkSession) -> None:
        """Use this Spark session; called between rounds or before `open`, possibly more than once.

        Until then batches come as `rows` only, and a batch that needs Spark raises SparkAwaited.
        """

    def apply(self, batch: TableBatch) -> TableRecord:
        """Apply a batch to the target of its table and return the table's new record.

        Idempotent: a target that is already at or beyond upto does not change. Truncates and generation ends remove
        only rows older than themselves. A row is replaced only by a later (position, ordinal). A batch that was
        interrupted is applied again from its start. The result is durable only once `publish` returned.

        Errors with the reaction QUARANTINE concern this table alone: a value that does not fit, a missing base row, a
        schema change that the target cannot follow. The target then stays as it was, and the loop records the failure
        and continues with the other tables. Any other error stops the sink.

        While `batch.is_copying`, a partial image without a base row in the target makes no row and is no error. The
        delete of the old key of a row whose key changed is still applied.

        The state is SNAPSHOTTING until a generation end closes the full copy, then STREAMING; it is never FAILED.
        """

    def publish(self, record: Published) -> None:
        """Make the cut visible in one atomic write; when it returns, the cut is durable.

        `record.tables` has every table of the sink, including those that the range did not touch. Such a table is at
        the new position without a commit of its own: positions come from the record alone, and the `txn` in a target
        only prevents a range from being merged twice. Raises SinkFenced, and writes nothing, when another driver
        published since this one opened or last published.
        """

    def pin(self, record: Published) -> str:
        """Keep the cut of a published record readable until `release`; returns its handle.

        Delta: JSON of target → version; search: the path of a copy.
        """

    def release(self, handle: str) -> None:
        """Stop keeping the cut for which `pin` returned this handle; an unknown handle is ignored."""

    def close(self) -> None:
        """Close connections and files; publishes nothing."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row of a batch that the target refuses, with the error."""

    row: int
    """Index among the batch's rows."""
    error: CdcError


class ParkedRows(Protocol):
    """The parked rows of one sink: those that its targets refused; for one driver."""

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """The parked rows of a table at the position of its target."""

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Store what a batch parks and unparks, in one commit that replaces all entries behind `after`.

        Durable when it returns. A sink whose batches become durable only in `publish` may write both in one commit
        there. The entries count once the target reaches the end of the batch. Called before each merge, also without
        entries: that removes entries of a failed attempt.
        """

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """Record that the batch was merged; `rows` are now the parked rows of the table."""


@runtime_checkable
class ParkingSink(Sink, Protocol):
    """A sink that can park single rows and apply the others."""

    @property
    def parked(self) -> ParkedRows:
        """The parked rows, once the sink is open."""

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """How many rows of a table may be parked; `stop_at` is 0 if a refused row stops the table."""

    def target_position(self, schema: TableSchema) -> int:
        """Return the position of a table's target, which decides the parked rows of a table never published."""

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """Return the function that removes from an image of the table what its target must not show."""

    def keeps_history(self, schema: TableSchema) -> bool:
        """Whether the target keeps more of a row than its latest state, so that it needs every change of a key."""

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """The rows of a batch that make `apply` fail, not many more than `limit` of them; changes nothing.

        For a target with history these are only rows with a value that it cannot store. The rows of `unparked` are
        numbered after those of `rows`, and a failure of one of them counts for its key.
        """
