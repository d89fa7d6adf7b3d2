"""The runner of a sink: a state machine that opens the sink, applies the log to it, and opens it again after a failure.

A sink does not wait for Spark: the runner itself folds and merges small ranges of the log in this process. The first
range that is for Spark (engine_decision.py) starts Spark and a streaming query (large_range_query.py), which applies it
and all later ones. The query stops when no range has needed it for a while; Spark does not.

    state            sink     what a step does
    ---------------  -------  ------------------------------------------------------------------------
    CLOSED           closed   open the sink once the back-off after a failure is over
    STANDBY          closed   ask for the lease, which another apply process has
    PAUSED           closed   confirm to the replay that the sink is closed
    HALTED           closed   nothing: another attempt would fail in the same way
    DIRECT           open     apply small ranges
    AWAITING_SPARK   open     start the query when the session is there: what waits is for Spark
    AWAITING_BATCH   open     the first batch of the query has not begun; stop the query when it is idle
    STREAMING        open     stop the query when it is idle

                OPENED           RANGE_NEEDS_SPARK
      CLOSED ─────────────▶ DIRECT ───────────────▶ AWAITING_SPARK
        ▲                     ▲                           │ QUERY_STARTED
        │ FAILED, REOPEN,     │ QUERY_IDLE                ▼
        │ STOPPED             │ (every state        AWAITING_BATCH
        │ (every open state)  │  on the right)            │ FIRST_BATCH
        └─────────────────────┴──────── STREAMING ◀───────┘

      CLOSED, every open state   FAILED_FOR_GOOD ▶ HALTED
      every state but STANDBY    LEASE_LOST      ▶ STANDBY   LEASE_GAINED ▶ CLOSED
      every other state          REPLAY_BEGAN    ▶ PAUSED    REPLAY_ENDED ▶ CLOSED

In every open state the runner applies the next slice of the log, unless what waits is for Spark. A step also releases
cuts that verification no longer reads, answers commands about dead letters and registers the applied position. Only
`_fire` changes the state. It looks the event up in `TRANSITIONS`, closes the sink if the sink is closed in the new
state, and does what entering the new state requires. A pair of state and event that is not in `TRANSITIONS` is a defect
and raises KeyError.

Only the runner's own thread fires events. Spark's thread sets attributes of the `OpenedSink` that the next step reads.
The main thread reads `is_standby`, `final_error` and `has_applied`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import Final

import structlog

from cdc.back_off import BackOff
from cdc.catalog.process_lease import LEASE
from cdc.config import Definition, EngineChoice
from cdc.config.sinks import DefinedSink
from cdc.errors import CdcError, LogTrimmed, Reaction, SinkError, SinkInUse
from cdc.position import Position
from cdc.targets.lake_access import access_error
from pipelines.dead_letters.requests import DeadLetterCommands
from pipelines.engine_decision import Engine
from pipelines.opened_sink import OpenedSink, has_log
from pipelines.runtime.executor_code import worker_error
from pipelines.sink_parts import SinkParts
from pipelines.sinks.contract import SparkAwaited
from pipelines.sinks.record_after_batch import failure_reason, log_trimmed_error

ATTEMPTS: Final = 5
"""Number of consecutive failures after which an apply process with --once stops trying the sink."""
DECIDE_EVERY: Final = 0.2
"""Seconds between two decisions while the streaming query is to apply what waits; each reads the list of log files."""
BACK_OFF: Final = BackOff(1.0, 30.0)
"""The back-off between attempts to open a sink."""

log = structlog.get_logger("apply")


class State(Enum):
    """States of the runner of a sink; the table at the top of this module says what a step does in each state."""

    CLOSED = auto()
    STANDBY = auto()
    PAUSED = auto()
    HALTED = auto()
    DIRECT = auto()
    AWAITING_SPARK = auto()
    AWAITING_BATCH = auto()
    STREAMING = auto()


class SinkEvent(Enum):
    """Events that change the state of the runner of a sink."""

    LEASE_LOST = auto()
    LEASE_GAINED = auto()
    REPLAY_BEGAN = auto()
    REPLAY_ENDED = auto()
    OPENED = auto()
    RANGE_NEEDS_SPARK = auto()
    QUERY_STARTED = auto()
    FIRST_BATCH = auto()
    QUERY_IDLE = auto()
    """Nothing has been for Spark for a while, or no longer is before the query has started."""
    REOPEN = auto()
    """A stopped table can continue: the sink is opened again, and the table catches up."""
    FAILED = auto()
    FAILED_FOR_GOOD = auto()
    """The sink failed with an error that another attempt would not resolve."""
    STOPPED = auto()


OPEN: Final = frozenset({State.DIRECT, State.AWAITING_SPARK, State.AWAITING_BATCH, State.STREAMING})
"""States in which the sink is open."""
WITH_QUERY: Final = frozenset({State.AWAITING_BATCH, State.STREAMING})
"""States in which a streaming query runs."""
_AWAITS_SPARK: Final = frozenset({State.AWAITING_SPARK, State.AWAITING_BATCH})

_FROM_CLOSED: Final = {
    SinkEvent.LEASE_LOST: State.STANDBY,
    SinkEvent.REPLAY_BEGAN: State.PAUSED,
    SinkEvent.FAILED: State.CLOSED,
    SinkEvent.FAILED_FOR_GOOD: State.HALTED,
}
_FROM_OPEN: Final = {**_FROM_CLOSED, SinkEvent.REOPEN: State.CLOSED, SinkEvent.STOPPED: State.CLOSED}

TRANSITIONS: Final[Mapping[State, Mapping[SinkEvent, State]]] = MappingProxyType(
    {
        State.CLOSED: {**_FROM_CLOSED, SinkEvent.OPENED: State.DIRECT},
        State.STANDBY: {SinkEvent.LEASE_GAINED: State.CLOSED},
        State.PAUSED: {SinkEvent.LEASE_LOST: State.STANDBY, SinkEvent.REPLAY_ENDED: State.CLOSED},
        State.HALTED: {SinkEvent.LEASE_LOST: State.STANDBY, SinkEvent.REPLAY_BEGAN: State.PAUSED},
        State.DIRECT: {**_FROM_OPEN, SinkEvent.RANGE_NEEDS_SPARK: State.AWAITING_SPARK},
        State.AWAITING_SPARK: {
            **_FROM_OPEN,
            SinkEvent.QUERY_STARTED: State.AWAITING_BATCH,
            SinkEvent.QUERY_IDLE: State.DIRECT,
        },
        State.AWAITING_BATCH: {
            **_FROM_OPEN,
            SinkEvent.FIRST_BATCH: State.STREAMING,
            SinkEvent.QUERY_IDLE: State.DIRECT,
        },
        State.STREAMING: {**_FROM_OPEN, SinkEvent.QUERY_IDLE: State.DIRECT},
    }
)
"""The next state of a runner, by state and event."""


@dataclass(slots=True)
class Failures:
    """The consecutive failures of one sink, and the time of the next attempt to open it."""

    error: CdcError | None = None
    """The error of the last failure."""
    is_final: bool = False
    """Whether another attempt would fail in the same way."""
    attempts: int = 0
    due: float = 0.0
    """Time of the next attempt, on the monotonic clock."""

    def count(self) -> None:
        """Count a failed attempt, and set the time of the next attempt by the back-off."""
        self.attempts += 1
        self.due = time.monotonic() + BACK_OFF.seconds(self.attempts)

    def reset(self) -> None:
        """Forget earlier failures, so that the sink is opened at once after a replay has replaced its target."""
        self.is_final = False
        self.attempts = 0
        self.due = 0.0


class SinkRunner:
    """Applies the log to one sink until it is stopped; the top of this module describes the states of the runner."""

    def __init__(self, definition: Definition, sink: DefinedSink, parts: SinkParts) -> None:
        self._definition = definition
        self._settings = sink
        self._parts = parts
        self.progress = parts.figures_of(definition.name, sink.name)
        self._requests = None if parts.catalog is None else DeadLetterCommands(definition, parts.catalog, self.progress)
        self._state = State.CLOSED
        self._opened: OpenedSink | None = None
        """The open sink; None unless the state is one of OPEN."""
        self._failures = Failures()
        self._standby_since = 0.0
        """Time at which STANDBY began, on the monotonic clock."""
        self._wants_spark = False
        """Whether the last decision was that what waits is for Spark."""
        self._decides_at = 0.0
        """Time of the next decision what applies the next range, on the monotonic clock."""

    @property
    def state(self) -> State:
        return self._state

    @property
    def is_standby(self) -> bool:
        """Whether another apply process has the lease of the sink."""
        return self._state is State.STANDBY

    @property
    def final_error(self) -> CdcError | None:
        """The error after which a process with --once gives up the sink; None while an attempt may still succeed."""
        if self._state is State.STANDBY and time.monotonic() - self._standby_since > LEASE:
            return SinkInUse(
                f"another apply process has the lease of sink {self._settings.name!r}: {self._other_process}",
                remedy="let the other process continue, or stop the other process and start this one again",
            )
        failures = self._failures
        return failures.error if failures.is_final or failures.attempts >= ATTEMPTS else None

    def has_applied(self, goal: Position) -> bool:
        """Return whether every running table has applied the log up to `goal`, or the sink has a final error."""
        if self.final_error is not None:
            return True
        opened = self._opened
        if opened is None or opened.loop.position < goal:
            return False
        return opened.loop.has_caught_up

    def step(self) -> None:
        """Do what the current state requires, once; the thread of the sink calls this method repeatedly."""
        self._follow_lease()
        if self._state is not State.STANDBY:
            self._follow_replay()
        if self._parts.spark.error is not None:
            return
        query = None if self._opened is None else self._opened.query
        if query is not None and query.has_ended:
            self._attempt(lambda: query.raise_error(self._settings.name))
        elif self._opened is not None and self._opened.loop.needs_reopen:
            self._fire(SinkEvent.REOPEN)
        else:
            self._step_closed()
            self._step_open()

    def apply_small_range(self) -> bool:
        """Apply the next range, unless the range needs Spark; return whether the position advanced."""
        opened = self._opened
        if opened is None:
            return False
        if self._state is State.AWAITING_BATCH and opened.query is not None and opened.query.has_begun:
            self._fire(SinkEvent.FIRST_BATCH)
        if time.monotonic() < self._decides_at or opened.is_throttled or opened.seconds_to_batch:
            return False
        before = opened.loop.position
        self._attempt(lambda: self._advance(opened))
        if self._opened is opened:
            self._attempt(opened.offer_cut)
        return self._opened is opened and opened.loop.position > before

    def pause(self, longest: float) -> float:
        """Return the seconds until the next call of `apply_small_range`, at most `longest`."""
        waits = 0.0 if self._opened is None else self._opened.seconds_to_batch
        return min(longest, waits or longest)

    def stop(self) -> None:
        """Wait until the running batch ends, then close the sink."""
        if self._state in OPEN:
            self._fire(SinkEvent.STOPPED)

    def _fire(self, event: SinkEvent) -> None:
        state = TRANSITIONS[self._state][event]
        if self._opened is not None and state not in OPEN:
            self._opened.close()
            self._opened = None
        if state is State.STANDBY:
            self._standby_since = time.monotonic()
        if state is State.PAUSED:
            self._failures.reset()
        self._state = state
        if state not in _AWAITS_SPARK:
            self.progress.awaits_spark = False
        if state not in OPEN:
            self.progress.awaits_core = False

    def _follow_lease(self) -> None:
        leases = self._parts.leases
        if leases is not None and not leases.try_acquire(self._settings.name):
            if self._state is not State.STANDBY:
                self._fire(SinkEvent.LEASE_LOST)
        elif self._state is State.STANDBY:
            self._fire(SinkEvent.LEASE_GAINED)

    def _follow_replay(self) -> None:
        pauses, name = self._parts.pauses, self._settings.name
        if pauses.is_paused(name):
            if self._state is not State.PAUSED:
                self._fire(SinkEvent.REPLAY_BEGAN)
            with suppress(CdcError):
                pauses.confirm(name)
        elif self._state is State.PAUSED:
            self._fire(SinkEvent.REPLAY_ENDED)

    def _step_closed(self) -> None:
        if self._state is not State.CLOSED:
            return
        if self._failures.is_final:  # halted before another process had the lease
            self._fire(SinkEvent.FAILED_FOR_GOOD)
        elif time.monotonic() >= self._failures.due:
            if self._settings.opens_with_spark or self._settings.rules_need_spark:
                self._parts.spark.request(f"sink {self._settings.name!r} has writer 'spark' or rules with expressions")
            if self._definition.spark.engine is EngineChoice.SPARK:
                self._parts.spark.request("spark.engine is 'spark'")
            if self._can_open:
                self._attempt(self._open)

    def _step_open(self) -> None:
        opened = self._opened
        if opened is None:
            return
        self._attempt(lambda: self._catch_up(opened))
        if self._opened is opened:
            self._attempt(lambda: self._follow_query(opened))
        if self._opened is opened:
            self.apply_small_range()
        if self._opened is None:
            return  # closed by a failure
        if opened.has_progress:
            self._failures.attempts = 0
        self._attempt(opened.offer_cut)
        if self._opened is None:
            return
        for handle in self._parts.cuts.pop_releases(self._settings.name):
            opened.sink.release(handle)
        if self._requests is not None:
            self._requests.process(opened.loop.quarantine)
        opened.register()

    @property
    def _can_open(self) -> bool:
        has_session = not self._settings.opens_with_spark or self._parts.spark.available is not None
        return has_session and (not self._settings.views or has_log(self._definition, self._settings))

    @property
    def _other_process(self) -> str:
        return "" if self._parts.leases is None else self._parts.leases.other_holder(self._settings.name)

    def _open(self) -> None:
        self._opened = OpenedSink(self._definition, self._settings, self._parts, self.progress)
        self._fire(SinkEvent.OPENED)
        self._opened.register(at_once=True)

    def _catch_up(self, opened: OpenedSink) -> None:
        try:
            opened.catch_up()
        except SparkAwaited as exc:
            self._parts.spark.request(str(exc))

    def _follow_query(self, opened: OpenedSink) -> None:
        """Start the streaming query if a range waits for it, or stop it if it is idle."""
        if self._state is State.AWAITING_SPARK and not self._wants_spark:
            self._fire(SinkEvent.QUERY_IDLE)
        elif self._state is State.AWAITING_SPARK:
            self._parts.spark.request(f"the next range of sink {self._settings.name!r} needs it")
            session = self._parts.spark.available
            if session is not None and self._parts.first_batch.enter(opened):
                opened.start_query(session)
                self._fire(SinkEvent.QUERY_STARTED)
        elif not self._wants_spark and opened.is_query_idle:
            opened.stop_query()
            self._fire(SinkEvent.QUERY_IDLE)

    def _advance(self, opened: OpenedSink) -> None:
        """Apply the next range here, or let the streaming query apply it; report what it waits for."""
        decision = opened.advance()
        awaits_core = opened.awaits_core(decision)
        if awaits_core and not self.progress.awaits_core:
            log.warning("a cluster gives no core", sink=self._settings.name, reason=decision.spark_reason)
        self.progress.awaits_core = awaits_core
        if decision.engine is Engine.SPARK:
            self._decides_at = time.monotonic() + DECIDE_EVERY
        self._wants_spark = decision.wants_spark
        if self._wants_spark and self._state is State.DIRECT:
            log.info("what waits is for Spark", sink=self._settings.name, reason=decision.spark_reason)
            self._fire(SinkEvent.RANGE_NEEDS_SPARK)
        elif self._wants_spark and opened.query is not None:
            opened.query.require()  # its next batch applies the range
        applies_nothing = decision.engine is Engine.SPARK and (awaits_core or self._state in _AWAITS_SPARK)
        self.progress.awaits_spark = applies_nothing

    def _attempt(self, act: Callable[[], None]) -> None:
        """Call `act`. If it fails, close the sink and delay the next attempt; after a final error, halt."""
        try:
            act()
        except Exception as exc:
            error, is_final = self._classify(exc)
            self._failures.error, self._failures.is_final = error, is_final
            self._fire(SinkEvent.FAILED_FOR_GOOD if is_final else SinkEvent.FAILED)
            self._failures.count()
            self.progress.record_failure(error)
            log.exception(
                "a sink failed and was closed; it is opened again after the back-off, or never if 'halted' is true",
                sink=self._settings.name,
                reason=failure_reason(error),
                halted=is_final,
                exc_info=not isinstance(exc, CdcError),
            )

    def _classify(self, exc: Exception) -> tuple[CdcError, bool]:
        """Return the error to report for `exc`, and whether another attempt would fail in the same way."""
        if isinstance(exc, LogTrimmed):
            # the end of the batch may have been trimmed, although the sink can continue from its own position
            is_final = self._opened is not None and self._opened.is_trimmed()
            return log_trimmed_error(exc, self._settings.name), is_final
        if isinstance(exc, CdcError):
            return exc, exc.reaction is Reaction.HALT
        if (error := worker_error(exc)) is not None:
            return error, error.reaction is Reaction.HALT
        if (denied := access_error(exc, f"a target of sink {self._settings.name!r}")) is not None:
            return denied, False
        return SinkError(f"sink {self._settings.name!r} failed with {type(exc).__name__}: {str(exc)[:300]}"), False
