"""Sink contract: the methods that the apply loop calls on a derived store, and the types of their arguments.

Theory. The loop cuts the log into ranges (after, upto], folds each to the latest state per key, and passes every table
its part. A sink **applies** table by table, then **publishes** one record of the position of every table. Applied is
not published: what `apply` did is durable in the target, but readers and progress rely only on what `publish` returned.

Limit: a target gets each change effectively once, not exactly once. A process may die at any point. The same range then
comes again, with the same or another end, and must leave the same target. Order comes from the (position, ordinal) of
each row, never from the order of calls.
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
"""Dead-letter limits under which no row is parked: the first row that the target refuses stops the table."""


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
    """Position after which the range begins. Earlier batches have applied all changes up to it."""
    upto: int
    """Position at which the range ends. The range includes this position."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate in the range; None without truncate. It removes every older row."""
    generation: int | None = None
    """Start position of the last full copy that ended in the range; None if none ended. It removes every older row."""
    endings: tuple[GenerationEnd, ...] = ()
    """Targets with history only: every truncate and end of a full copy in the range, by position."""
    since: int = 0
    """Targets with history only: position up to which the log has only latest states; 0 if it has every change."""
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

        During the copy, the base row of a partial image may be missing in the target. It arrives before the copy ends.
        """
        return self.schema.state is TableState.SNAPSHOTTING

    @property
    def ends_copy(self) -> bool:
        """Whether a full copy of the table ended in the range. Such a copy replaces every row of the target."""
        return self.generation is not None and not self.is_copying


class SparkAwaited(Exception):
    """Raised when a batch needs Spark and Spark has not started yet. The loop applies the batch again later."""


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

        The store then belongs to the log `log_id`. Raises SinkOfAnotherLog if the store has rows of another log, and
        SinkUnavailable (retried) if the store does not answer.
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
    """The parked rows of one sink, which its targets refused. Only one driver uses them."""

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """Return the parked rows of a table, by key, as of the position of its target."""

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Store the entries of the rows that a batch parks or unparks, in one commit.

        The commit replaces all entries with a position later than `after`, such as those of a failed attempt. So the
        caller calls `write` before each merge, even if `entries` is empty. The entries are durable when the call
        returns, but take effect only once the target reaches the end of the batch. If the batches of a sink become
        durable in `publish`, it may write the entries there.
        """

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """Replace the parked rows of a table by `rows`, after the batch was merged."""


@runtime_checkable
class ParkingSink(Sink, Protocol):
    """A sink that can park single rows and apply the others."""

    @property
    def parked(self) -> ParkedRows:
        """The parked rows of the sink; available while the sink is open."""

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """Return how many rows of a table may be parked; `stop_at` is 0 if the first refused row stops the table."""

    def target_position(self, schema: TableSchema) -> int:
        """Return the position of a table's target.

        If the table was never published, its dead-letter entries up to this position are valid.
        """

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """Return the function that removes or masks the columns of an image that the target must not show."""

    def keeps_history(self, schema: TableSchema) -> bool:
        """Whether the target keeps more of a row than its latest state, so that it needs every change of a key."""

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """Return the rows of a batch that make `apply` fail, without changing the target.

        The list has at most slightly more than `limit` rows. For a target with history, it has only rows with a value
        that the target cannot store. Row numbers count `batch.rows` first, then `batch.unparked`. If a
        row of `batch.unparked` is refused, its whole key is refused.
        """
