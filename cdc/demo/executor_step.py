"""Step of the demo in which Spark applies a backlog: the whole log, to a new sink.

On one machine the apply process takes backlogs itself, because Spark has the same cores. So this step runs an apply
process of its own with `spark.engine: spark`. It starts during the workload, and waits for its log until the workload
has ended. Meanwhile the backlog grows, and Spark starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Self

from cdc import metrics
from cdc.catalog import Catalog
from cdc.demo import terminal
from cdc.demo.processes import DemoProcesses, pipelines_command
from cdc.demo.query_runner import LakeQueries
from cdc.demo.shop_workload import write_marker
from cdc.demo.step_results import Step, StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.demo.workspace import BACKLOG, BACKLOG_PIPELINE
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.service.pipeline_children import Child
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN

NAME: Final = "executors"
SECONDS: Final = 240.0
"""Maximum seconds for a Spark session with a lower priority to apply the log, on two cores that others use as well."""
_OF_CDC: Final = frozenset({POSITION_COLUMN, ORDINAL_COLUMN})


@dataclass(frozen=True, slots=True)
class SparkBatches:
    """What Spark has applied to the sink, as its apply process reported."""

    batches: int
    rows: int
    seconds: float
    """Duration of these batches, from fold to publish."""

    @classmethod
    def reported(cls, catalog: Catalog) -> Self:
        """Read the last report of the apply process."""
        figures = catalog.processes.figures(BACKLOG_PIPELINE, "apply")
        labels = (BACKLOG_PIPELINE, BACKLOG, "spark")
        of_spark = {name: value for name, found, value in figures if tuple(found) == labels}
        return cls(
            int(of_spark.get(metrics.ENGINE_BATCHES.name, 0)),
            int(of_spark.get(metrics.ENGINE_ROWS.name, 0)),
            float(of_spark.get(metrics.ENGINE_SECONDS.name, 0.0)),
        )


@dataclass(slots=True)
class ExecutorStep:
    """Lets Spark apply the whole log to a new sink, and compares the sink with the lake.

    As a context manager it ends the apply process. No workload may run at the same time as `run`.
    """

    queries: LakeQueries
    """Queries on the lake, which the apply process of the demo fills."""
    screen: Terminal
    dsn: str
    """Connection string of the shop's database."""
    _children: DemoProcesses | None = field(init=False, default=None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._end()

    def start(self) -> None:
        """Start the apply process, which waits for its log, unless it was started before."""
        if self._children is None:
            workspace = self.queries.workspace
            command = pipelines_command("apply", workspace.define_backlog())
            self._children = DemoProcesses(workspace, [Child(NAME, tuple(command))])
            self._children.__enter__()

    def _end(self) -> None:
        if self._children is not None:
            self._children.kill()  # killing an apply process is safe at any time

    def run(self, catalog: Catalog) -> list[Step]:
        """Let the apply process have the log, wait until the sink has all of it, and compare its rows with the lake."""
        self.start()
        self.screen.doing(NAME, "a new sink: Spark applies its backlog, the whole log, in an apply process of its own")
        step = run_step(self.screen, NAME, lambda: self.compare(catalog))
        self._end()
        return [step]

    def compare(self, catalog: Catalog) -> StepResult:
        """Wait until lake and sink have applied the whole log; return what Spark applied and whether both are equal."""
        last = write_marker(self.dsn, NAME)
        wait = Wait(self.screen, NAME, SECONDS)
        wait.until("the lake has applied the whole log", lambda: self.queries.has_reached(catalog, last))
        self.queries.workspace.offer_log()
        copy = LakeQueries(self.queries.workspace, BACKLOG, BACKLOG_PIPELINE)

        def applied() -> SparkBatches | None:
            if self._children is not None:
                self._children.check()
            reported = SparkBatches.reported(catalog)
            return reported if reported.seconds and copy.has_reached(catalog, last) else None

        return self.compare_now(wait.until("Spark has applied the whole log", applied))

    def compare_now(self, applied: SparkBatches) -> StepResult:
        """Return the result for a log that has been applied to the sink."""
        workspace, copy = self.queries.workspace, LakeQueries(self.queries.workspace, BACKLOG)
        record, log = copy.lake.published(), LogReader(workspace.log)
        end = Position(0) if record is None else Position(record.position)
        changes = sum(file.rows for file in log.files(Position(0), end))
        topics = [] if record is None else sorted(table.topic for table in record.tables.values())
        equal = bool(topics) and all(rows_of(copy, topic) == rows_of(self.queries, topic) for topic in topics)
        rate = changes / applied.seconds if applied.seconds else 0.0
        text = (
            f"executors of Spark read and folded the backlog of a new sink: {changes:,} changes in "
            f"{applied.seconds:.1f} s ({rate:,.0f}/s) → {applied.rows:,} rows of {len(topics)} tables"
            f"{', equal to the lake' if equal else ': NOT EQUAL'}; the driver wrote these small tables"
        )
        hint = terminal.cdc_command("spark print", workspace.definition)
        facts = {"changes": changes, "batches": applied.batches, "seconds": applied.seconds}
        return StepResult(text, hint, equal and applied.batches > 0, applied.rows, facts)


def rows_of(queries: LakeQueries, topic: str) -> list[str]:
    """Return the rows of a table in any order, without the positions: a backfill for the lake alone changed some."""
    columns = ", ".join(f'"{name}"' for name in queries.columns(topic) if name not in _OF_CDC)
    return sorted(map(repr, queries.rows(f"SELECT {columns} FROM {topic}")))
