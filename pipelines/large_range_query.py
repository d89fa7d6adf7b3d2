"""The streaming query of a sink: Spark applies the ranges of the log that `engine_decision.py` gives it.

The runner of the sink starts the query when the next range is for Spark, and stops it after IDLE seconds without such a
range; with `spark.engine: spark` the query always runs. While it runs, the runner still applies small ranges itself. If
it has applied the range of a query's batch already, the batch does nothing. Between two runs of the query, Spark plans
nothing and costs no CPU.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from cdc.config import Definition
from cdc.config.sinks import DefinedSink
from cdc.errors import SinkError
from cdc.failpoint import hit
from cdc.file_modes import make_private_directory
from cdc.position import Position
from pipelines.engine_decision import Engine
from pipelines.sink_loop import SinkLoop
from pipelines.source.options import tables_option

INTERVAL: Final = 1.0
"""Minimum seconds between the starts of two batches of a query; planning a batch takes 0.2 s of two cores."""
IDLE: Final = 30.0
"""Seconds without a range that needs Spark, after which the query stops."""


class LargeRangeQuery:
    """One run of the streaming query of one sink, from `start` to `stop`; the runner's thread calls the methods.

    A thread of Spark calls `_apply`. It records that the first batch has begun, and the exception that ended a batch.
    """

    def __init__(self, loop: SinkLoop, on_batch: Callable[[], None], after_batch: Callable[[], None]) -> None:
        """The functions are called in Spark's thread. on_batch: called before a batch begins; it may wait for a core of
        the cluster. after_batch: called when a batch ends; it may wait, so that Spark plans the next batch afterwards,
        with all rows that are durable then.
        """
        self._loop = loop
        self._on_batch = on_batch
        self._after_batch = after_batch
        self._query: StreamingQuery | None = None
        self._checkpoint: Path | None = None
        self._error: Exception | None = None
        self._is_stopped = self._is_applying = False
        self._needed_at = time.monotonic()
        self.has_begun = False
        """Whether Spark has begun the first batch."""

    @property
    def idle_seconds(self) -> float:
        """Seconds since a range last needed Spark; 0 while a batch is applied."""
        return 0.0 if self._is_applying else time.monotonic() - self._needed_at

    @property
    def has_ended(self) -> bool:
        """Whether the query has ended, although `stop` was not called."""
        return self._query is not None and not self._query.isActive

    def require(self) -> None:
        """Record that the next range needs Spark, so that the query continues."""
        self._needed_at = time.monotonic()

    def start(
        self,
        session: SparkSession,
        definition: Definition,
        sink: DefinedSink,
        limits: tuple[int, int],
    ) -> None:
        """Start at the sink's position. limits: approximate maximum of rows, and maximum of bytes, per batch."""
        base = Path(definition.spark.checkpoint.removeprefix("file://"))
        make_private_directory(base)
        self._checkpoint = Path(tempfile.mkdtemp(prefix=f"{sink.name}-", dir=base))
        rows = (
            session.readStream.format("cdc")
            .option("path", str(definition.log_of(sink)))
            .option("storage", definition.log.storage.to_json())
            .option("tables", tables_option(sink.tables))
            .option("boundaries", "true")  # so that Spark also makes a batch if only the position moved
            .option("maxRowsPerTrigger", str(limits[0]))
            .option("maxBytesPerTrigger", str(limits[1]))
            .option("startingPosition", str(self._loop.position))
            .load()
        )
        self._query = (
            rows.writeStream.foreachBatch(self._apply)
            # on this machine, even if a cluster has another default store; unquoted, because Hadoop does not decode %20
            .option("checkpointLocation", f"file://{self._checkpoint}")
            .queryName(f"{definition.name}-{sink.name}")
            .trigger(processingTime=f"{int(max(definition.spark.trigger, INTERVAL) * 1000)} milliseconds")
            .start()
        )

    def raise_error(self, sink: str) -> None:
        """Raise the error that ended the query; raise SinkError if it ended without an error."""
        raised = self._query.exception() if self._query else None
        raise (
            self._error or raised or SinkError(f"the streaming query of sink {sink!r} ended without an error message")
        )

    def stop(self) -> None:
        """Wait until the running batch ends, then stop the query and remove its checkpoint."""
        with self._loop.between_batches():
            self._is_stopped = True
        if self._query is not None:
            self._query.stop()
        if self._checkpoint is not None:
            shutil.rmtree(self._checkpoint, ignore_errors=True)

    def _apply(self, rows, batch_id):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202 - Spark inspects it
        self._on_batch()
        self.has_begun = True
        hit("after_offsets")
        try:
            self._apply_range(rows, _end_of_batch(self._checkpoint, batch_id))  # type: ignore[arg-type]
            hit("before_commits")
            self._after_batch()
        except Exception as exc:
            self._error = exc  # Spark forwards only its text
            raise

    def _apply_range(self, rows: DataFrame, end: Position) -> None:
        with self._loop.between_batches():
            if self._is_stopped:
                return
            before, self._is_applying = self._loop.position, True
            try:
                while self._loop.apply_micro_batch(rows, end):
                    pass
            finally:
                if self._loop.position > before and self._loop.last_engine is Engine.SPARK:
                    self.require()
                self._is_applying = False


def _end_of_batch(checkpoint: Path, batch: int) -> Position:
    """Return the last position of a batch, from the offset log that Spark writes before it runs the batch."""
    return Position(json.loads((checkpoint / "offsets" / str(batch)).read_text().splitlines()[2])["position"])
