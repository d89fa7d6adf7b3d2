"""The Spark session of an apply process, which starts when something needs it for the first time.

A JVM takes seconds of CPU to start, and hundreds of megabytes of memory. A pipeline with small ranges never needs it,
because the process itself folds and merges them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from threading import Lock
from typing import Final, Self

import structlog
from py4j.protocol import Py4JError
from pyspark.sql import SparkSession

from cdc.config import Definition, EngineChoice
from cdc.errors import SparkUnavailable
from cdc.thread_priority import lower_thread_priority
from pipelines.runtime.spark_session import SparkSettings, check_prerequisites, spark_session, starts_on_demand
from pipelines.source.data_source import register
from pipelines.warm_executors import has_executors, warm_executors, warm_planners

log = structlog.get_logger("apply")

NICE_INCREMENT: Final = 5
"""Amount by which the nice value of a JVM on this machine is increased.

Spark does the large work: large ranges of a sink, and large merges of the log. Meanwhile the other sinks, the reader
and the source server need the same cores for small work that is late after a second.
"""


class SparkOnDemand:
    """The Spark session of a process, started at most once; any thread may call the methods."""

    def __init__(self, start: Callable[[], Future[SparkSession]]) -> None:
        """start: begins to start the session in another thread."""
        self._start, self._lock = start, Lock()
        self._session: Future[SparkSession] | None = None
        self._is_stopped = False

    @classmethod
    def of(cls, definition: Definition, thread: Executor) -> Self:
        """Prepare the session of a definition, which a thread of the executor starts.

        On this machine the thread and the session get a lower priority, so the executor should do nothing else.
        Raises SparkUnavailable if Java or a jar is missing. The session starts at once if the master is a cluster,
        because the operator should see its errors at once, if Delta's jars must be downloaded, or if the definition
        gives Spark every batch.
        """
        settings = SparkSettings.of(definition, f"cdc-{definition.name}")
        check_prerequisites(settings)
        spark = cls(lambda: thread.submit(_start_session, settings, definition))
        if not starts_on_demand(settings):
            spark.request("the master is not local, or the jars of Delta must be downloaded")
        elif definition.spark.engine is EngineChoice.SPARK:
            spark.request("spark.engine is spark")
        return spark

    @property
    def available(self) -> SparkSession | None:
        """The session; None if no session has started."""
        session = self._session
        return session.result() if session is not None and session.done() and session.exception() is None else None

    @property
    def error(self) -> BaseException | None:
        """The error of the start; None if the start has not ended, or has ended with a session."""
        return self._session.exception() if self._session is not None and self._session.done() else None

    def request(self, reason: str) -> None:
        """Begin to start the session, unless this was done before. reason: what needs it, for the log."""
        self._requested(reason)

    def session(self, reason: str) -> SparkSession:
        """Return the session; start it if necessary, and wait for it.

        Raises the error of the start, and SparkUnavailable after `stop`.
        """
        return self._requested(reason).result()

    def stop(self) -> None:
        """Stop the session if it was started; raise no error if a signal has already ended its JVM.

        A signal to the process group reaches the JVM too.
        """
        with self._lock:
            self._is_stopped = True
        if self._session is not None and self._session.exception() is None:
            with suppress(Py4JError, OSError):
                self._session.result().stop()

    def _requested(self, reason: str) -> Future[SparkSession]:
        with self._lock:
            if self._session is None and self._is_stopped:
                raise SparkUnavailable("Spark is not started, because this process ends")
            if self._session is None:
                log.info("Spark starts", reason=reason)
                self._session = self._start()
            return self._session


def _start_session(settings: SparkSettings, definition: Definition) -> SparkSession:
    if settings.local:
        lower_thread_priority(NICE_INCREMENT)
    session = spark_session(settings)
    if has_executors(settings):
        warm_executors(session)
    register(session)
    if has_executors(settings):
        warm_planners(session, definition.log.path, definition.log.storage.to_json())
    return session
