"""Sink parts: what the strategies of one Delta sink share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from cdc.stores.target_rules import TargetRules
from pipelines.runtime.progress import ExternalCommitReport
from pipelines.runtime.throttle import CommitRate
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.external_commits import ExternalCommitWatch
from pipelines.sinks.delta.open_targets import OpenTargets
from pipelines.sinks.delta.published import LastPublished
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.table_plan import TablePlans
from pipelines.sinks.delta.writers import Writers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class DeltaSinkParts:
    """The parts of one Delta sink; any thread may use them."""

    settings: DeltaSettings
    rules: TargetRules
    plans: TablePlans
    writers: Writers
    published: LastPublished
    targets: OpenTargets
    commit_rate: CommitRate
    external_commits: ExternalCommitWatch
    parked: DeadLetterTable

    @classmethod
    def of(cls, settings: DeltaSettings) -> Self:
        """The parts of a sink that is not open yet."""
        plans, writers, published = TablePlans(settings.rules), Writers(settings.writer, settings.path), LastPublished()
        return cls(
            settings=settings,
            rules=TargetRules(settings.table, settings.rules),
            plans=plans,
            writers=writers,
            published=published,
            targets=OpenTargets(settings, plans, writers, published),
            commit_rate=CommitRate(settings.max_rewrite),
            external_commits=ExternalCommitWatch(ExternalCommitReport()),
            parked=DeadLetterTable(settings.parked_uri),
        )

    def attach(self, spark: SparkSession) -> None:
        """Let Spark compute expressions, and write what is large if it has Delta."""
        self.plans.spark = spark
        self.writers.attach(spark)

    def close(self) -> None:
        """Forget the open targets and which of their commits were seen."""
        self.targets.close()
        self.external_commits.forget()
