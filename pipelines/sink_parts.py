"""What the sinks of an apply process share: the session, leases, requests, figures and the cuts for the views."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from cdc import metrics
from cdc.catalog import Catalog
from pipelines.engine_decision import EngineLimits
from pipelines.executor_cores import ExecutorCores
from pipelines.large_range_query import IDLE
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses
from pipelines.runtime.sink_lease import SinkLeases
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.spark_on_demand import SparkOnDemand
from pipelines.views.input_cuts import InputCuts

CORE_WAIT: Final = 30.0
"""Seconds for which a cluster may give no core before the status of a sink says so.

Executors need 10 to 20 seconds to start.
"""


class FirstBatchGate:
    """Lets streaming queries start one after the other, because simultaneous starts slow each other down.

    A query has started when its first batch begins.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: object = None

    def enter(self, owner: object) -> bool:
        """Give the gate to `owner` if no other sink has it; return whether `owner` now has it."""
        with self._lock:
            self._owner = self._owner or owner
            return self._owner is owner

    def leave(self, owner: object) -> None:
        """Free the gate if `owner` has it: the first batch of its query has begun, or the sink is closed."""
        with self._lock:
            if self._owner is owner:
                self._owner = None


@dataclass(frozen=True, slots=True)
class SinkParts:
    """Services that all sinks of an apply process share."""

    cuts: CutRequests
    pauses: ReplayPauses
    figures: metrics.Metrics
    spark: SparkOnDemand
    """The Spark session; its JVM takes seconds to start."""
    leases: SinkLeases | None = None
    """The leases on the sinks; None if no other process can fill the same sinks."""
    catalog: Catalog | None = None
    """The catalog with the commands about dead letters; None: the sinks answer no such commands."""
    first_batch: FirstBatchGate = field(default_factory=FirstBatchGate)
    input_cuts: InputCuts | None = None
    """Takes the cuts of the sink that the views read; None without views."""
    limits: EngineLimits = field(default_factory=EngineLimits)
    """The sizes that decide which engine applies a batch, and how large it is."""
    query_idle: float = IDLE
    """Seconds without a range that needs Spark, after which a streaming query stops."""
    cores: ExecutorCores | None = None
    """The cores of Spark's executors; None: those of the session of `spark`."""
    core_wait: float = CORE_WAIT
    """Seconds for which a cluster may give no core before the status of a sink says so."""

    def figures_of(self, pipeline: str, sink: str) -> SinkFigures:
        """Return what records the progress of one sink."""
        return SinkFigures(pipeline, sink, self.figures)
