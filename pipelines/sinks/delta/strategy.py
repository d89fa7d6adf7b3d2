"""Keeping strategies: how a Delta sink merges a batch into the target of one table.

The settings of a table choose the strategy. pipelines.sinks.delta.latest_state keeps the latest state of each row.
pipelines.sinks.delta.history keeps versions, marked rows or every change. Whether several tables share the target does
not matter to a strategy: pipelines.sinks.delta.target_part hides that from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from pipelines.runtime.throttle import CommitRate
from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.external_commits import ExternalCommitWatch
from pipelines.sinks.delta.open_targets import OpenTargets
from pipelines.sinks.delta.published import LastPublished
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.table_plan import TablePlans
from pipelines.sinks.delta.target import DeltaTarget
from pipelines.sinks.delta.writers import Writers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class KeepingStrategy(Protocol):
    """How the targets of some tables are kept; called with the lock of the table."""

    replaced_by_copy: bool
    """Whether a full copy replaces every row of the target."""

    def merge(self, target: DeltaTarget, batch: TableBatch) -> None:
        """Evolve the target's columns and merge a batch; the last commit carries the `txn` of the range.

        The batch has the columns and types of its rows in this target. Raises CommitFailedError if another commit came
        first.
        """

    def find_refused(self, target: DeltaTarget, batch: TableBatch, limit: int) -> list[RefusedRow]:
        """See pipelines.sinks.contract.ParkingSink.find_refused."""

    def rows_upto(self, target: DeltaTarget) -> int:
        """The position up to which the rows of a table are in its target."""


@dataclass(frozen=True, slots=True)
class DeltaSinkParts:
    """The services that the strategies of one Delta sink share; any thread may use them."""

    settings: DeltaSettings
    plans: TablePlans
    writers: Writers
    published: LastPublished
    targets: OpenTargets
    commit_rate: CommitRate
    external_commits: ExternalCommitWatch
    parked: DeadLetterTable

    @classmethod
    def of(cls, settings: DeltaSettings) -> Self:
        """The services of a sink that is not open yet."""
        plans, writers, published = TablePlans(settings.rules), Writers(settings.writer, settings.path), LastPublished()
        return cls(
            settings=settings,
            plans=plans,
            writers=writers,
            published=published,
            targets=OpenTargets(settings, plans, writers, published),
            commit_rate=CommitRate(settings.max_rewrite),
            external_commits=ExternalCommitWatch(),
            parked=DeadLetterTable(settings.parked_uri),
        )

    def attach(self, spark: SparkSession) -> None:
        """Let Spark compute expressions, and write large batches if it has Delta."""
        self.plans.spark = spark
        self.writers.attach(spark)

    def close(self) -> None:
        """Forget the open targets and which of their commits were checked."""
        self.targets.close()
        self.external_commits.forget()
