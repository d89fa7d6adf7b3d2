"""A thread that computes views, with a Spark session of its own."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from cdc.config import DeltaSinkDefinition
from pipelines.views.view_computation import ViewComputation
from pipelines.views.view_inputs import ViewInputs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POOL: Final = "views"
"""Scheduler pool of Spark in which a short computation does not wait for the end of a long one."""
_CANCEL_AGAIN: Final = 0.5
"""Seconds after which the jobs of a thread that should end are cancelled again: it may have begun another one."""


class ViewThread:
    """Computes one view at a time."""

    def __init__(self, session: SparkSession, sink: DeltaSinkDefinition) -> None:
        """session: no other thread uses it. sink: the sink whose targets are the inputs."""
        self.inputs = ViewInputs(session, sink)
        self._context, self._jobs = session.sparkContext, f"views-{uuid4().hex}"
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=POOL, initializer=self._prepare)
        self._running: tuple[ViewComputation, Future[None]] | None = None

    @property
    def computation(self) -> ViewComputation:
        """The computation that was started last."""
        assert self._running is not None  # noqa: S101 - it was started
        return self._running[0]

    def start(self, computation: ViewComputation) -> None:
        """Begin a computation; the one before has ended."""
        self._running = computation, self._pool.submit(computation.run, self.inputs)

    def has_ended(self, patience: float | None = 0.0) -> bool:
        """Return whether the computation has ended, after `patience` seconds at most; None: wait until it has."""
        assert self._running is not None  # noqa: S101 - it was started
        return not wait([self._running[1]], patience).not_done

    def result(self) -> ViewComputation:
        """Return the computation, which has ended, or raise the error that ended it."""
        assert self._running is not None  # noqa: S101 - it was started
        computation, future = self._running
        future.result()
        return computation

    def close(self) -> None:
        """Stop the running computation, and end the thread."""
        if self._running is not None:
            self._running[0].is_stopped.set()
            while not self._running[1].done():
                self._context.cancelJobGroup(self._jobs)
                self.has_ended(_CANCEL_AGAIN)
            self._running[0].discard()
        self._pool.shutdown()

    def _prepare(self) -> None:
        """Let the jobs of this thread be scheduled, and cancelled, together."""
        self._context.setJobGroup(self._jobs, "computes views")
        self._context.setLocalProperty("spark.scheduler.pool", POOL)
