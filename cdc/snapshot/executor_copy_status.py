"""Status of a copy by executors, computed from the commands in the catalog, as values and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

from cdc.catalog import Catalog
from cdc.catalog.commands import JOB_LEASE, Command
from cdc.catalog.process_lease import is_dead
from cdc.table import TableSchema

OFFER: Final = "copy.executors"
"""Kind of the command with which a driver offers executors; its payload has the fields `tasks` and JOB_LEASE."""
TASK: Final = "copy.chunk"
"""Kind of the command that asks for a chunk; its payload is a ChunkTask, its result a StagedChunk or an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorCopy:
    """What the executors of a running 'cdc spark submit copy' have read, and what they read now."""

    tasks: int
    """Maximum number of tasks at the same time."""
    chunks: int
    """Number of chunks that the reader got from this job so far."""
    rows: int
    """Number of rows in these chunks."""
    tables: dict[str, int]
    """Topic → number of its chunks that the reader waits for now."""

    @property
    def text(self) -> str:
        """One line for a person."""
        numbers = [f"{topic} ({tasks} {'task' if tasks == 1 else 'tasks'})" for topic, tasks in self.tables.items()]
        now = ", ".join(numbers) or "no chunk"
        done = f"{self.rows:,} rows in {self.chunks:,} chunks so far"
        return f"executors read {now}, up to {self.tasks} tasks at a time; {done}"


def executor_copy(catalog: Catalog, pipeline: str) -> ExecutorCopy | None:
    """Return what executors do for the reader of a pipeline; None if no driver offers executors."""
    offer = valid_offer(catalog, pipeline)
    if offer is None:
        return None
    schemas = (TableSchema.from_json(task.payload["schema"]) for task in catalog.commands.pending(pipeline, TASK))
    topics = Counter(schema.topic for schema in schemas)
    done = offer.result or {}
    return ExecutorCopy(
        tasks=int(offer.payload["tasks"]),
        chunks=int(done.get("chunks", 0)),
        rows=int(done.get("rows", 0)),
        tables=dict(sorted(topics.items())),
    )


def valid_offer(catalog: Catalog, pipeline: str) -> Command | None:
    """Return the newest offer whose driver runs."""
    offers = catalog.commands.pending(pipeline, OFFER)
    holders = ((offer, catalog.leases.holder(offer.payload[JOB_LEASE])) for offer in reversed(offers))
    return next((offer for offer, holder in holders if holder is not None and not is_dead(holder)), None)
