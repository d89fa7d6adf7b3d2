"""Live: the demo while the pipeline runs, from the first row in the log to the last table proved equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from shlex import quote
from threading import Event
from typing import Final

from cdc.catalog import Catalog
from cdc.demo.dead_letter_step import DeadLetterStep
from cdc.demo.history_sink_step import HistorySinkStep
from cdc.demo.lag_line import lag_line
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.pipeline_probe import FIND, LAKE, Freshness, PipelineProbe, PipelineSnapshot
from cdc.demo.processes import DemoProcesses
from cdc.demo.report import DemoReport
from cdc.demo.settings import Settings
from cdc.demo.shell_commands import command, shown
from cdc.demo.steps import StepSequence
from cdc.demo.terminal import Terminal
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.verification_step import compare_log, verify
from cdc.demo.wal_marker import mark
from cdc.demo.workload import Workload
from cdc.demo.workspace import Workspace
from cdc.errors import PositionNotReached
from cdc.position import Position
from cdc.service.machine_load import LAG_BAR

LOOK_EVERY: Final = 0.1
"""Seconds between two looks while a first row is awaited, or the end; its time is exact to that."""
LOOK_CALMLY_EVERY: Final = 0.5
"""Seconds between two looks once every sink has rows: as often as the sinks report."""
FIGURES_EVERY: Final = 2.0
"""Seconds between two lines of figures."""
ALTER_AFTER: Final = 30.0
"""Seconds to the schema change of a demo without end; with one it comes after a third."""
TOUR_AFTER: Final = 40.0
"""Seconds to the tour of a demo without end."""
DRAIN_SECONDS: Final = 180.0
"""A first batch on two cores with a cold JVM takes 20 s; the rest is for slower machines."""
SPEAK_AFTER: Final = 3.0
"""Seconds of waiting for the log before the wait is explained."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Stage:
    """Where a demo plays."""

    settings: Settings
    screen: Terminal
    place: Workspace
    dsn: str
    """Of the shop."""
    port: int
    """Of the page."""


@dataclass(slots=True)
class LivePhase:
    """One run; `play` is called once."""

    stage: Stage
    children: DemoProcesses
    watch: PipelineProbe
    stop: Event
    outcome: DemoReport = field(default_factory=DemoReport)
    _freshness: Freshness = field(default_factory=Freshness)
    _figures_at: float = 0.0
    _slow: str | None = None
    """Why sinks were late, the last time that this machine was the reason."""
    _altered: bool = False
    _before: Position | None = None
    """Where the lake stood when the schema change had not happened."""

    def play(self) -> DemoReport:
        """Wait for the log, write, watch, drain, prove; an empty outcome when stopped before the first row."""
        self._announce_processes()
        if not self._wait_for_log():
            return self.outcome
        workload = self._start_workload()
        try:
            self._watch_workload(workload)
        finally:
            written = workload.stop()
        self.outcome.changes, self._altered = written.changes, written.altered
        self._drain()
        if self.stage.settings.spark:
            self._close()
        else:
            self._prove()
        return self.outcome

    def _announce_processes(self) -> None:
        screen, settings, place = self.stage.screen, self.stage.settings, self.stage.place
        screen.done("web", f"http://127.0.0.1:{self.stage.port}   ← open this   (metrics /metrics · API /docs)")
        if not settings.spark:
            return
        screen.doing(
            "spark", f"session 4.2.0 local[2] starts in its own process   tail -f {shown(place.output('apply'))}"
        )
        if not settings.jars:
            screen.doing(
                "jar",
                "Delta's, 87 MB, once, from Maven Central unless in the Ivy cache; or: cdc demo --delta-jars FILE",
            )

    def _wait_for_log(self) -> bool:
        """Whether the first copy is in the log; not when the demo was stopped before."""
        screen = self.stage.screen
        began, told = screen.seconds, False
        while not self.stop.wait(LOOK_EVERY):
            self.children.check()
            sight = self.watch.look()
            if sight.durable is not None:
                self._announce_log(sight.durable)
                return True
            if not told and screen.seconds - began > SPEAK_AFTER:
                told = True
                log = shown(self.stage.place.output("reader"))
                screen.doing("reader", f"compiles its decoder: numba, once per machine, up to 20 s   tail -f {log}")
        return False

    def _announce_log(self, durable: Position) -> None:
        screen, place = self.stage.screen, self.stage.place
        self.outcome.first_row_seconds["log"] = round(screen.seconds, 2)
        copied = " · ".join(f"{topic.partition('.')[2]} {rows:,}" for topic, rows in self.watch.copied(durable))
        screen.done("source", f"slot cdc_shop · publication cdc_shop_pub   try: {command('doctor', place.definition)}")
        screen.done("snapshot", f"{copied}   try: {command('status', place.definition)}")
        screen.done(
            "log",
            f"{shown(place.log)} from {durable}   try: {command('tail shop.orders -n 5', place.definition)}",
        )

    def _start_workload(self) -> Workload:
        settings = self.stage.settings
        alter_after = ALTER_AFTER if settings.seconds is None else settings.seconds / 3
        workload = Workload(self.stage.dsn, settings.rate, alter_after=alter_after)
        workload.start()
        what = "orders placed, paid, cancelled; notes moved; carts emptied; 1 schema change"
        self.stage.screen.done(
            "workload", f"{settings.rate:g} changes/s: {what} after {alter_after:.0f} s   ^C to stop"
        )
        return workload

    def _watch_workload(self, workload: Workload) -> None:
        """Until it is stopped, or its seconds are over; the tour comes then, or after a while where there is no end."""
        screen, seconds = self.stage.screen, self.stage.settings.seconds
        began, sight = screen.seconds, None
        while not self.stop.wait(LOOK_EVERY if self._awaited else LOOK_CALMLY_EVERY):
            if screen.seconds - began >= (TOUR_AFTER if seconds is None else seconds) and not self.outcome.tour:
                self._tour()
                if seconds is not None:
                    return
            written = workload.written
            if not written.altered and sight is not None:
                self._before = sight.sinks.get(LAKE, self._before)
            if written.altered and not self._altered:
                self._altered = True
                screen.done(
                    "schema", f"orders has gift_note now   try: psql {quote(self.stage.dsn)} -c '\\d shop.orders'"
                )
            sight = self._look()
            if screen.seconds - self._figures_at >= FIGURES_EVERY:
                self._figures_at = screen.seconds
                screen.passing(self._figures(sight, written.changes))

    def _tour(self) -> None:
        if not self.stage.settings.spark:
            return
        if self._awaited:
            self.stage.screen.doing("tour", "left out: not every sink has rows yet; --seconds N makes it wait longer")
        else:
            self.outcome.tour = StepSequence(self._past, self.stop).go()

    @property
    def _past(self) -> TimeTravelStep:
        return TimeTravelStep(LakeQueries(self.stage.place, LAKE), self.stage.screen, self._before, self._altered)

    def _close(self) -> None:
        """What is shown once the load is over, so that it weighs on no figure; then the proof of every sink."""
        stage, closing = self.stage, self.outcome.closing
        shelf = LakeQueries(stage.place, LAKE)
        if not self.outcome.tour:
            closing += self._past.go()
        with (
            Catalog.open(stage.place.catalog_url) as catalog,
            HistorySinkStep(shelf, stage.screen, stage.dsn, catalog) as history,
        ):
            closing += DeadLetterStep(shelf, stage.screen, stage.dsn, catalog).go()
            versions = history.go()
            closing += versions
            # one that did not come must not keep the others from their proof
            self._prove(() if all(step.equal for step in versions) else stage.settings.sinks)

    @property
    def _awaited(self) -> bool:
        return bool(self.stage.settings.sinks) and None in self.outcome.first_row_seconds.values()

    def _look(self) -> PipelineSnapshot:
        self.children.check()
        sight = self.watch.look()
        self._freshness.add(sight)
        self._slow = sight.slow or self._slow
        for sink, name in ((LAKE, "delta"), (FIND, "search")):
            if sink in sight.sinks and self.outcome.first_row_seconds[name] is None:
                self.outcome.first_row_seconds[name] = round(self.stage.screen.seconds, 2)
                self._announce_sink(sink, sight)
        return sight

    def _announce_sink(self, sink: str, sight: PipelineSnapshot) -> None:
        place, screen = self.stage.place, self.stage.screen
        if sink == LAKE:
            version, _ = sight.versions.get((LAKE, "shop.orders"), (None, 0))
            told = "" if version is None else f"orders v{version} · "
            query = command('query "select status, count(*) from shop.orders group by 1"', place.definition)
            screen.done("delta", f"{told}{shown(place.state / 'lake')}   try: {query}")
        else:
            words = command('search shop.products "blue mug"', place.definition)
            screen.done("search", f"tantivy {shown(place.state / 'search')}   try: {words}")

    def _figures(self, sight: PipelineSnapshot, changes: int) -> str:
        slot = "" if sight.slot_retained is None else f"     slot retained {sight.slot_retained / _MIB:.1f} MiB"
        return f"lag  {lag_line(sight, self.stage.settings.sinks)}     changes {changes:,}{slot}     ^C to stop"

    def _drain(self) -> None:
        """Until the log holds the last transaction and every sink stands at or beyond it."""
        screen, began = self.stage.screen, self.stage.screen.seconds
        last = mark(self.stage.dsn, "drain")
        waiting = Event()  # ^C was the order to come here; only a second one, an exception, ends the wait
        target: Position | None = None
        while True:
            sight = self._look()
            if target is None and sight.durable is not None and sight.durable.lsn >= last:
                target = sight.durable
            late = self._late(sight, target)
            if not late:
                break
            if screen.seconds - began > DRAIN_SECONDS:
                raise PositionNotReached(f"not at {last} after {DRAIN_SECONDS:.0f} s: {', '.join(late)}")
            waiting.wait(LOOK_EVERY)
        sinks = len(self.stage.settings.sinks)
        subject = f"log and {sinks} sinks" if sinks else "log"
        screen.done("drained", f"{subject} at {target} in {screen.seconds - began:.1f} s")

    def _late(self, sight: PipelineSnapshot, target: Position | None) -> list[str]:
        if target is None:
            return ["log"]
        return [sink for sink in self.stage.settings.sinks if sight.sinks.get(sink, Position(0)) < target]

    def _prove(self, sinks: Sequence[str] = ()) -> None:
        outcome, screen, settings = self.outcome, self.stage.screen, self.stage.settings
        outcome.freshness = {
            "delta_p50_ms": self._freshness.p50_ms(LAKE),
            "search_p50_ms": self._freshness.p50_ms(FIND),
        }
        if settings.spark:
            screen.doing("verify", "every row of every target against its source, in a Spark session of its own")
            outcome.tables = verify(self.stage.place, sinks)
        elif (log := self.watch.log) is not None:
            outcome.tables = compare_log(self.stage.dsn, log)
        for table in outcome.tables:
            report = screen.done if table.equal else screen.failed
            report("verify", f"{table.name:<18} {table.rows:>8,} rows   {'equal' if table.equal else 'NOT EQUAL'}")
        for name, p50 in outcome.freshness.items():
            if p50 is not None:
                late = f"   {self._slow}" if self._slow and p50 > LAG_BAR * 1000 else ""
                screen.done("freshness", f"{name.partition('_')[0]} p50 {p50:,.0f} ms from commit to visible{late}")
