"""Keeping strategies: how a Delta sink merges a batch into the target of one table.

The settings of a table choose its strategy. pipelines.sinks.delta.latest_state_strategy keeps the latest state of each
row. pipelines.sinks.delta.history_strategy keeps versions, rows marked as deleted, or every change. A strategy need not
know whether several tables share the target, because pipelines.sinks.delta.target_part handles that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pipelines.runtime.throttle import CommitRate
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.background_rewriter import BackgroundRewriter
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.external_commits import ExternalCommitWatch
from pipelines.sinks.delta.open_targets import OpenTargets
from pipelines.sinks.delta.published_cuts_table import LastPublished
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.target_shapes import TablePlans
from pipelines.sinks.delta.writers import Writers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class KeepingStrategy(Protocol):
    """Merges batches into targets, and decides what a target keeps of each row. The caller has the table lock."""

    replaced_by_copy: bool
    """Whether a full copy replaces every row of the target."""

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Change the target's columns as the batch requires, then merge the batch.

        The last commit contains the `txn` of the batch's range. The caller has already given `batch.schema` the columns
        and types of this target. Raises CommitFailedError if another client committed first.
        """

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See pipelines.sinks.contract.ParkingSink.find_refused."""

    def rows_upto(self, target: DeltaTarget) -> int:
        """Return the position up to which the target contains all changes of its table."""


@dataclass(frozen=True, slots=True)
class DeltaSinkParts:
    """The objects that a Delta sink and its keeping strategies share; any thread may use them."""

    settings: DeltaSettings
    plans: TablePlans
    writers: Writers
    published: LastPublished
    targets: OpenTargets
    commit_rate: CommitRate
    external_commits: ExternalCommitWatch
    parked: DeadLetterTable
    rewriter: BackgroundRewriter

    @classmethod
    def of(cls, settings: DeltaSettings) -> Self:
        """Create the objects for a sink that is not open yet."""
        plans, published = TablePlans(settings.rules), LastPublished()
        writers = Writers(settings)
        return cls(
            settings=settings,
            plans=plans,
            writers=writers,
            published=published,
            targets=OpenTargets(settings, plans, writers, published),
            commit_rate=CommitRate(settings.max_rewrite),
            external_commits=ExternalCommitWatch(),
            parked=DeadLetterTable(settings.parked_uri),
            rewriter=BackgroundRewriter(writers.indexed),
        )

    def attach(self, spark: SparkSession) -> None:
        """Use a Spark session to compute expressions, and to write large batches if the session supports Delta."""
        self.plans.spark = spark
        self.writers.attach(spark)

    def close(self) -> None:
        """Remove the open targets, and the versions up to which their commits were checked, from these objects."""
        self.targets.close()
        self.rewriter.close()
        self.writers.indexed.close()
        self.external_commits.forget()
