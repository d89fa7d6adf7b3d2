"""Merge strategies: how a Delta sink merges a batch into the target of one table.

The settings of a table choose its strategy. pipelines.sinks.delta.latest_state_strategy keeps the latest state of each
row. pipelines.sinks.delta.history_strategy keeps versions, rows marked as deleted, or every change. A strategy need not
know whether several tables share the target, because pipelines.sinks.delta.target_part handles that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from pipelines.sinks.contract import RefusedRow, TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget

if TYPE_CHECKING:
    pass


class MergeStrategy(Protocol):
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
