"""Parts of a Delta sink: the objects that the sink and its merge strategies share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from pipelines.runtime.nulled_counts import NulledCounts
from pipelines.runtime.throttle import CommitRate
from pipelines.sinks.delta.background_rewriter import BackgroundRewriter
from pipelines.sinks.delta.commit_sync import CommitSync
from pipelines.sinks.delta.dead_letters import DeadLetterTable
from pipelines.sinks.delta.external_commits import ExternalCommitWatch
from pipelines.sinks.delta.open_targets import OpenTargets
from pipelines.sinks.delta.published_cuts_table import LastPublished
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.target_columns import TablePlans
from pipelines.sinks.delta.writers import Writers

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True)
class DeltaSinkParts:
    """The objects that a Delta sink and its merge strategies share; any thread may use them."""

    settings: DeltaSettings
    plans: TablePlans
    writers: Writers
    published: LastPublished
    targets: OpenTargets
    commit_rate: CommitRate
    external_commits: ExternalCommitWatch
    nulled: NulledCounts
    parked: DeadLetterTable
    rewriter: BackgroundRewriter
    commits: CommitSync

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
            nulled=NulledCounts(),
            parked=DeadLetterTable(settings.parked_uri),
            rewriter=BackgroundRewriter(writers.indexed),
            commits=CommitSync(),
        )

    def attach(self, spark: SparkSession) -> None:
        """Use a Spark session to compute expressions, and to write large batches if the session supports Delta."""
        self.plans.spark = spark
        self.writers.attach(spark)

    def close(self) -> None:
        """Stop the background rewriter, save the key indexes, and forget the open targets."""
        self.targets.close()
        self.rewriter.close()
        self.writers.indexed.close()
        self.external_commits.forget()
