"""Sink contract: the methods that the apply loop calls on a derived store, and the types of their arguments.

Theory. The loop divides the log into ranges (after, upto]. It folds each range to the latest state per key, and passes
the changes of each table to the sink.

A sink **applies** table by table, then **publishes** one record of the position of every table. Applied is not
published: `apply` may already have changed a target, but readers and progress rely only on the published record.

Guarantee: each change takes effect once, although it may be applied twice. A process may die at any point. The next
process applies the range again, possibly up to another end. The target must then have the same rows as if no process
had died. Order comes from the (position, ordinal) of each row, never from the order of calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, runtime_checkable

import pyarrow as pa

from cdc.config import DeadLetterSettings
from cdc.errors import CdcError
from cdc.table import TableSchema, TableState
from cdc.targets.dead_letter_rows import DeadLetterEntry, Image, Key, ParkedRow
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.folding.folded_parts import FoldedParts
from pipelines.folding.history_changes import GenerationEnd

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from pipelines.runtime.nulled_counts import NulledCounts
    from pipelines.runtime.sink_status_reporter import ExternalCommitReport
    from pipelines.runtime.throttle import CommitRate

__all__ = [
    "NONE_PARKED",
    "DeadLetterSettings",
    "ExecutorSink",
    "ObservedSink",
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
"""A function that removes from a row image the columns that the target does not have, and masks the values that the
target masks.
"""

NONE_PARKED: Final = DeadLetterSettings(stop_at=0)
"""Dead-letter limits under which no row is parked: the first row that the target refuses stops the table."""


@dataclass(frozen=True, slots=True)
class TableBatch:
    """The changes of one source table in a range (after, upto] of the log: at most one folded row per key.

    `rows` has the changes on the driver (pipelines.folding.fold.FOLDED_ARROW, op `u` and `d` only). If they are too
    large for the driver, `frame` or `parts` has the rows on the executors. With `frame`, `rows` is None. With `parts`,
    `rows` has those rows of the batch that the driver must see, because they concern parked keys, or None. All three
    are None if the range contains only truncates, ends of full copies and schema changes of the table. For a target
    with history, `rows` and `parts` have every single change, as pipelines.folding.history_changes makes them.
    """

    schema: TableSchema
    """The schema of the source table at position upto."""
    rows: pa.Table | None
    frame: DataFrame | None
    after: int
    """Position after which the range begins. Earlier batches have applied all changes up to it."""
    upto: int
    """Position at which the range ends. The range includes this position."""
    truncated: tuple[int, int] | None = None
    """(position, ordinal) of the last truncate in the range, which removes every older row; None without a truncate."""
    generation: int | None = None
    """Start position of the last full copy that ended in the range; None if none ended. Rows older than this position
    are removed.
    """
    endings: tuple[GenerationEnd, ...] = ()
    """Targets with history only: every truncate and end of a full copy in the range, sorted by position."""
    since: int = 0
    """Targets with history only: position up to which the log has only the latest state of each key; 0 if the log has
    every single change of the range.
    """
    unparked: pa.Table | None = None
    """Targets with history only: the changes of keys that were parked until this batch, which merges these changes.
    `rows` does not contain them.
    """
    earlier_endings: tuple[GenerationEnd, ...] = ()
    """Truncates and ends of full copies before the range that apply to the keys of `unparked`."""
    parked_keys: tuple[Key, ...] = ()
    """Targets with history only: the keys that are parked at the end of the range."""
    parts: FoldedParts | None = None
    """Rows on the executors, for an ExecutorSink that takes them; no key is in both `rows` and `parts`."""

    def __post_init__(self) -> None:
        if self.rows is not None and self.frame is not None:
            raise ValueError(f"batch of {self.schema.topic!r} has both rows and a frame: expected one of the two")
        if self.parts is not None and self.frame is not None:
            raise ValueError(f"batch of {self.schema.topic!r} has both parts and a frame: expected one of the two")
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


SchemasAt = Callable[[int], Mapping[int, TableSchema]]
"""A function that returns relation → schema of its table in the log, at a position."""


def no_schemas(position: int) -> Mapping[int, TableSchema]:  # noqa: ARG001 - the signature of SchemasAt
    """Return no schemas, for a sink that is opened without its log."""
    return {}


class SparkAwaited(Exception):
    """Raised when a batch needs Spark and Spark has not started yet. The loop applies the batch again later."""


class Sink(Protocol):
    """A derived store of one source; one driver calls its methods.

    The driver calls `open` first and `close` last, also after a failure. In between, it works in rounds. A round calls
    `apply` once for each table with changes, in any order and from up to `parallel` threads. Two threads never apply
    changes to one table at the same time. When these calls have returned, the round calls `publish` once. The driver
    calls `pin` and `release` between rounds. A crash may end this sequence at any point; the next call is then `open`.
    """

    name: str
    """Name of the sink in the definition; metrics and messages contain it."""
    parallel: int
    """Maximum number of tables to which the driver applies batches at once; 1 if the engine has one writer."""
    parallel_from: int
    """Mean number of rows per table from which several threads are faster than one; 0: always."""

    def open(self, log_id: str, schemas_at: SchemasAt = no_schemas) -> Published | None:
        """Open the store and return its published record; return None if nothing was ever published.

        If the target of a table is older than the published record, for instance because its directory was restored
        from a copy, the record of the table has the position of the target and the schema of the log at that position.

        A new store belongs to the log `log_id` from now on. Raises SinkOfAnotherLog if the store has rows of another
        log, and SinkUnavailable (retried) if the store does not answer.
        """

    def attach(self, spark: SparkSession) -> None:
        """Use this Spark session from now on; called between rounds or before `open`, possibly more than once.

        Before the first call, batches have only `rows`, and a batch that needs Spark raises SparkAwaited.
        """

    def apply(self, batch: TableBatch) -> TableRecord:
        """Apply a batch to the target of its table and return the table's new record.

        Idempotent: a target whose position is already at or after upto does not change. A truncate removes only rows
        that are older than the truncate. The end of a full copy removes only rows that are older than the start of the
        copy. A row is replaced only by a row with a later (position, ordinal). A batch that was interrupted is applied
        again from its start. The result is durable only once `publish` returned.

        Errors with the reaction QUARANTINE concern this table alone: a value that does not fit, a missing base row, a
        schema change that the target cannot follow. The target then stays as it was, and the loop records the failure
        and continues with the other tables. Any other error stops the sink.

        While `batch.is_copying`, a partial image without a base row in the target makes no row and is no error. If such
        an image moves a row to another key, the row with the old key is still deleted.

        The state of the returned record is SNAPSHOTTING until a full copy has ended, then STREAMING; never FAILED.
        """

    def publish(self, record: Published) -> None:
        """Make the cut of this record visible to readers in one atomic write; after the call, the cut is durable.

        `record.tables` has every table of the sink. A table without changes in the range reaches the new position
        without a commit of its own, because readers take positions from the record. The `txn` in a target has another
        purpose: it prevents a second merge of a range. Raises SinkFenced, and writes nothing, if another driver
        published since this driver opened the sink or last published.
        """

    def pin(self, record: Published) -> str:
        """Keep the cut of a published record readable until `release`; return a handle for `release`.

        The handle of a Delta sink is a JSON text, target → version; that of a search sink is the path of a copy.
        """

    def release(self, handle: str) -> None:
        """Stop keeping the cut for which `pin` returned this handle; an unknown handle is ignored."""

    def close(self) -> None:
        """Close connections and files; publishes nothing."""


@dataclass(frozen=True, slots=True)
class RefusedRow:
    """A row of a batch that the target refuses, with the error."""

    row: int
    """Index of the row in `batch.rows`; indexes of `batch.unparked` follow those of `batch.rows`."""
    error: CdcError


@dataclass(frozen=True, slots=True)
class RefusedParts:
    """Rows on the executors that the target refuses."""

    rows: pa.Table
    """The rows, as folded (pipelines.folding.fold.FOLDED_ARROW)."""
    is_complete: bool
    """Whether `rows` has all refused rows; it has a few of them if there are more than may be parked."""


class ParkedRows(Protocol):
    """The parked rows of one sink, which its targets refused. Only one driver uses them."""

    def rows_of(self, relation: int) -> Mapping[Key, ParkedRow]:
        """Return the parked rows of a table, by key, as of the position of its target."""

    def write(self, relation: int, after: int, entries: Iterable[DeadLetterEntry]) -> None:
        """Store the entries of the rows that a batch parks or unparks, in one commit.

        The commit also removes the table's entries of batches that end after `after`, such as those of a failed
        attempt. So the caller calls `write` before each merge, even if `entries` is empty. The entries are durable when
        the call returns, but take effect only once the target reaches the end of the batch. A sink whose batches become
        durable in `publish` may write the entries in `publish` instead.
        """

    def confirm(self, relation: int, rows: Mapping[Key, ParkedRow]) -> None:
        """Make `rows` the parked rows of a table, as `rows_of` returns them. Called after the batch was merged."""


@runtime_checkable
class ParkingSink(Sink, Protocol):
    """A sink that can park the rows that its target refuses, and merge all other rows."""

    @property
    def parked(self) -> ParkedRows:
        """The parked rows of the sink; available while the sink is open."""

    def parking_limits(self, schema: TableSchema) -> DeadLetterSettings:
        """Return how many rows of a table may be parked; `stop_at` is 0 if the first refused row stops the table."""

    def target_position(self, schema: TableSchema) -> int:
        """Return the position up to which the target has all changes of a table.

        If the table was never published, its dead-letter entries up to this position are valid, and later ones are not.
        """

    def image_mask(self, schema: TableSchema) -> ImageMask:
        """Return the function that removes or masks the columns of an image that the target must not show."""

    def keeps_history(self, schema: TableSchema) -> bool:
        """Whether the target keeps more than the latest state of a row; its batches then have every single change."""

    def find_refused(self, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """Return the rows of a batch that make `apply` fail, without changing the target.

        The list may be slightly longer than `limit`. For a target with history, the list has only rows with a value
        that the target cannot store. Row numbers count `batch.rows` first, then `batch.unparked`. If a row of
        `batch.unparked` is refused, its whole key is refused.
        """


@runtime_checkable
class ObservedSink(Protocol):
    """A sink with targets about which the status of the apply process says more than position and errors."""

    commit_rate: CommitRate
    """The limit on rewritten bytes."""
    external_commits: ExternalCommitReport
    """Commits of other clients in the targets."""
    nulled: NulledCounts
    """Values that the targets have as NULL, because their types cannot represent them."""
    index_notice: Callable[[str], str | None]
    """Function from the URI of a target to a sentence about its missing or incomplete key index."""


@runtime_checkable
class ExecutorSink(Protocol):
    """A sink whose batches may have `parts`: Spark's executors write the rows of a large batch from where they are."""

    def takes_parts(self, schema: TableSchema) -> bool:
        """Return whether batches of a table may have `parts`; otherwise all its folded rows come to the driver."""

    def find_refused_in_parts(self, batch: TableBatch, limit: int) -> RefusedParts:
        """Return the rows in `batch.parts` that make `apply` fail, without changing the target.

        limit: maximum number of upserts among them; if there are more, only a few come to the driver. For a target with
        history, the result has all changes of about `limit` refused keys.
        """
