"""Runs the demo from start to end: database, pipeline processes, workload, steps, verification."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from threading import Event
from typing import Final

from cdc.catalog import Catalog
from cdc.demo.executor_step import ExecutorStep
from cdc.demo.pipeline_observer import LAKE, SEARCH, Freshness, PipelineProbe, PipelineSnapshot
from cdc.demo.processes import DemoProcesses
from cdc.demo.query_runner import LakeQueries
from cdc.demo.search_cluster import SearchCluster, search_cluster
from cdc.demo.shop_workload import Workload, make_shop, write_marker
from cdc.demo.sink_steps import DeadLetterStep, HistorySinkStep, StepSequence
from cdc.demo.step_results import DemoReport
from cdc.demo.terminal import Terminal, cdc_command, display_path, lag_line
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.verification_step import compare_log, verify
from cdc.demo.workspace import DOCUMENTS, MARTS, POSTGRES_PORT, Workspace, free_port, open_workspace
from cdc.errors import PositionNotReached
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.service.machine_load import LAG_THRESHOLD
from cdc.service.warm_process import WarmProcess

POLL_INTERVAL: Final = 0.1
"""Seconds between two snapshots of the pipeline until every sink has rows, and after the workload has ended."""
SLOW_POLL_INTERVAL: Final = 0.5
"""Seconds between two snapshots of the pipeline after every sink has rows; sinks report at this interval."""
LAG_LINE_INTERVAL: Final = 2.0
"""Seconds between two lines of lags on the terminal."""
ALTER_AFTER: Final = 30.0
"""Seconds from the workload's start to its schema change; with --seconds N, the change comes after N/3 seconds."""
TOUR_AFTER: Final = 40.0
"""Seconds from the workload's start to the tour (time travel, backfill, replay); with --seconds N, after N seconds."""
DRAIN_SECONDS: Final = 180.0
"""Maximum seconds for the sinks to apply the rest of the log.

A first batch on two cores with a cold JVM takes 20 s, and slower machines need more.
"""
EXPLAIN_AFTER: Final = 3.0
"""Seconds of waiting for the log after which the demo explains the wait."""
_MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class DemoContext:
    """Settings and resources of one run of the demo."""

    settings: DemoSettings
    screen: Terminal
    workspace: Workspace
    dsn: str
    """Connection string of the shop's database."""
    port: int
    """Port of the page."""


@dataclass(slots=True)
class LivePhase:
    """The part of the demo in which its processes run; `play` may be called once."""

    context: DemoContext
    children: DemoProcesses
    probe: PipelineProbe
    stop: Event
    report: DemoReport = field(default_factory=DemoReport)
    _freshness: Freshness = field(default_factory=Freshness)
    _lag_line_at: float = 0.0
    _slow: str | None = None
    """Last text that named this machine's load as the cause of a long lag; None if there was none."""
    _is_altered: bool = False
    """True once the workload has made its schema change."""
    _position_before: Position | None = None
    """Position of the lake before the schema change."""

    def play(self) -> DemoReport:
        """Wait for the log, run the workload, wait for the sinks, and verify.

        Return an empty report if the demo is stopped before the log has rows.
        """
        if (cluster := self.context.settings.cluster) is not None:
            self.report.search = cluster.shown
        self.report.first_row_seconds |= dict.fromkeys(self._rows_of.values())
        self._announce_processes()
        if not self._wait_for_log():
            return self.report
        workload = self._start_workload()
        with ExecutorStep(self._lake, self.context.screen, self.context.dsn) as executors:
            try:
                self._watch_workload(workload, executors)
            finally:
                counters = workload.stop()
            self.report.changes, self._is_altered = counters.changes, counters.altered
            self._drain()
            if self.context.settings.spark:
                self._run_closing_steps(executors)
            else:
                self._verify()
        return self.report

    def _announce_processes(self) -> None:
        screen, settings, workspace = self.context.screen, self.context.settings, self.context.workspace
        screen.done("web", f"http://127.0.0.1:{self.context.port}   ← open this   (metrics /metrics · API /docs)")
        if not settings.spark:
            return
        screen.doing(
            "apply",
            "a process applies the log to the sinks, and starts Spark only for what does not fit it   "
            f"tail -f {display_path(workspace.output('apply'))}",
        )
        if not settings.jars:
            screen.doing(
                "jar",
                "downloads Delta's jars once from Maven Central (87 MB), unless the Ivy cache has them; "
                "to use local files: cdc demo --delta-jars FILE",
            )

    def _wait_for_log(self) -> bool:
        """Wait until the log has its first rows; return False if the demo is stopped before."""
        screen = self.context.screen
        began, is_explained = screen.seconds, False
        while not self.stop.wait(POLL_INTERVAL):
            self.children.check()
            snapshot = self.probe.snapshot()
            if snapshot.durable is not None:
                self._announce_log(snapshot.durable)
                return True
            if not is_explained and screen.seconds - began > EXPLAIN_AFTER:
                is_explained = True
                log = display_path(self.context.workspace.output("reader"))
                screen.doing(
                    "reader", f"compiles its decoder with numba, once per machine, in up to 20 s   tail -f {log}"
                )
        return False

    def _announce_log(self, durable: Position) -> None:
        screen, workspace = self.context.screen, self.context.workspace
        self.report.first_row_seconds["log"] = round(screen.seconds, 2)
        copied = " · ".join(f"{topic.partition('.')[2]} {rows:,}" for topic, rows in self.probe.copied(durable))
        screen.done(
            "source", f"slot cdc_shop · publication cdc_shop_pub   try: {cdc_command('doctor', workspace.definition)}"
        )
        screen.done("snapshot", f"{copied}   try: {cdc_command('status', workspace.definition)}")
        screen.done(
            "log",
            f"{display_path(workspace.log)} from {durable}   "
            f"try: {cdc_command('tail shop.orders -n 5', workspace.definition)}",
        )

    def _start_workload(self) -> Workload:
        settings = self.context.settings
        alter_after = ALTER_AFTER if settings.seconds is None else settings.seconds / 3
        workload = Workload(self.context.dsn, settings.rate, alter_after=alter_after)
        workload.start()
        what = "orders placed, paid, cancelled; notes moved; carts emptied; 1 schema change"
        self.context.screen.done(
            "workload", f"{settings.rate:g} changes/s: {what} after {alter_after:.0f} s   ^C to stop"
        )
        return workload

    def _watch_workload(self, workload: Workload, executors: ExecutorStep) -> None:
        """Print the lags of the sinks until the demo is stopped or its seconds are over.

        During this time the tour (the steps of StepSequence) runs once.
        """
        screen, seconds = self.context.screen, self.context.settings.seconds
        began, snapshot = screen.seconds, None
        while not self.stop.wait(POLL_INTERVAL if self._is_waiting else SLOW_POLL_INTERVAL):
            if screen.seconds - began >= (TOUR_AFTER if seconds is None else seconds) and not self.report.tour:
                self._run_tour(executors)
                if seconds is not None:
                    return
            counters = workload.counters
            if not counters.altered and snapshot is not None:
                self._position_before = snapshot.sinks.get(LAKE, self._position_before)
            if counters.altered and not self._is_altered:
                self._is_altered = True
                screen.done(
                    "schema",
                    f"column gift_note was added to orders   try: psql {quote(self.context.dsn)} -c '\\d shop.orders'",
                )
            snapshot = self._probe()
            if screen.seconds - self._lag_line_at >= LAG_LINE_INTERVAL:
                self._lag_line_at = screen.seconds
                screen.update(self._lag_line(snapshot, counters.changes))

    def _run_tour(self, executors: ExecutorStep) -> None:
        if not self.context.settings.spark:
            return
        if self._is_waiting:
            self.context.screen.doing(
                "tour", "skipped: not every sink has rows yet; run the demo with a higher --seconds N"
            )
        else:
            executors.start()  # Spark starts meanwhile
            self.report.tour = StepSequence(self._time_travel, self.stop).run()

    @property
    def _lake(self) -> LakeQueries:
        return LakeQueries(self.context.workspace, LAKE)

    @property
    def _time_travel(self) -> TimeTravelStep:
        return TimeTravelStep(self._lake, self.context.screen, self._position_before, self._is_altered)

    def _run_closing_steps(self, executors: ExecutorStep) -> None:
        """Run the steps that would slow down the sinks during the workload, and then verify the sinks."""
        context, closing, queries = self.context, self.report.closing, self._lake
        if not self.report.tour:
            closing += self._time_travel.run()
        with Catalog.open(context.workspace.catalog_url) as catalog:
            closing += executors.run(catalog)
            with HistorySinkStep(queries, context.screen, context.dsn, catalog) as history:
                closing += DeadLetterStep(queries, context.screen, context.dsn, catalog).run()
                versions = history.run()
                closing += versions
                # verify the other sinks even if the history sink failed
                self._verify(() if all(step.equal for step in versions) else context.settings.sinks)

    @property
    def _rows_of(self) -> dict[str, str]:
        """Return sink → name of its first rows in the report."""
        of_views = {DOCUMENTS: "documents", MARTS: "revenue"} if self.context.settings.with_views else {}
        return {LAKE: "delta", SEARCH: "search", **of_views}

    @property
    def _is_waiting(self) -> bool:
        return bool(self.context.settings.sinks) and None in self.report.first_row_seconds.values()

    def _probe(self) -> PipelineSnapshot:
        self.children.check()
        snapshot = self.probe.snapshot()
        self._freshness.add(snapshot)
        self._slow = snapshot.slow or self._slow
        for sink, name in self._rows_of.items():
            if sink in snapshot.sinks and self.report.first_row_seconds[name] is None:
                self.report.first_row_seconds[name] = round(self.context.screen.seconds, 2)
                self._announce_sink(sink, snapshot)
        return snapshot

    def _announce_sink(self, sink: str, snapshot: PipelineSnapshot) -> None:
        workspace, screen = self.context.workspace, self.context.screen
        if sink in {DOCUMENTS, MARTS}:
            views = cdc_command("views ls", workspace.definition)
            screen.done("view", f"{display_path(workspace.state / sink)}   try: {views}")
        elif sink == LAKE:
            version, _ = snapshot.versions.get((LAKE, "shop.orders"), (None, 0))
            text = "" if version is None else f"orders v{version} · "
            query = cdc_command('query "select status, count(*) from shop.orders group by 1"', workspace.definition)
            screen.done("delta", f"{text}{display_path(workspace.state / 'lake')}   try: {query}")
        else:
            words = cdc_command('search shop.products "blue mug"', workspace.definition)
            cluster = self.context.settings.cluster
            place = f"tantivy {display_path(workspace.state / 'search')}" if cluster is None else cluster.shown
            screen.done("search", f"{place}   try: {words}")

    def _lag_line(self, snapshot: PipelineSnapshot, changes: int) -> str:
        slot = "" if snapshot.slot_retained is None else f"     slot retained {snapshot.slot_retained / _MIB:.1f} MiB"
        return f"lag  {lag_line(snapshot, self.context.settings.sinks)}     changes {changes:,}{slot}     ^C to stop"

    def _drain(self) -> None:
        """Wait until the log has the last transaction and every sink has applied it."""
        screen, began = self.context.screen, self.context.screen.seconds
        last = write_marker(self.context.dsn, "drain")
        never = Event()  # the first ^C has ended the workload; a second ^C raises and ends this wait
        target: Position | None = None
        while True:
            snapshot = self._probe()
            if target is None and snapshot.durable is not None and snapshot.durable.lsn >= last:
                target = snapshot.durable
            late = self._late(snapshot, target)
            if not late:
                break
            if screen.seconds - began > DRAIN_SECONDS:
                raise PositionNotReached(
                    f"{', '.join(late)} did not reach {last}, the end of the workload, in {DRAIN_SECONDS:.0f} s"
                )
            never.wait(POLL_INTERVAL)
        sinks = len(self.context.settings.sinks)
        subject = f"log and {sinks} sinks" if sinks else "log"
        screen.done("drained", f"{subject} reached {target} in {screen.seconds - began:.1f} s")

    def _late(self, snapshot: PipelineSnapshot, target: Position | None) -> list[str]:
        if target is None:
            return ["log"]
        late = [sink for sink in self.context.settings.sinks if snapshot.sinks.get(sink, Position(0)) < target]
        return late or (self.probe.late_views(target) if self.context.settings.with_views else [])

    def _verify(self, sinks: Sequence[str] = ()) -> None:
        report, screen, settings = self.report, self.context.screen, self.context.settings
        report.freshness = {
            "delta_p50_ms": self._freshness.p50_ms(LAKE),
            "search_p50_ms": self._freshness.p50_ms(SEARCH),
        }
        if settings.spark:
            screen.doing("verify", "comparing every row of every target with its source, in a process of its own")
            report.tables = verify(self.context.workspace, sinks)
        elif (log := self.probe.log) is not None:
            report.tables = compare_log(self.context.dsn, log)
        for table in report.tables:
            say = screen.done if table.equal else screen.failed
            say("verify", f"{table.name:<18} {table.rows:>8,} rows   {'equal' if table.equal else 'NOT EQUAL'}")
        for name, p50 in report.freshness.items():
            if p50 is not None:
                late = f"   {self._slow}" if self._slow and p50 > LAG_THRESHOLD * 1000 else ""
                screen.done("freshness", f"{name.partition('_')[0]} p50 {p50:,.0f} ms from commit to visible{late}")


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoSettings:
    """Settings of one run of the demo."""

    folder: Path
    seconds: float | None = None
    """Seconds for which the workload runs; None to run until the demo is stopped."""
    rate: float = 200.0
    """Number of changes per second that the workload writes."""
    keep: bool = False
    version: int = 18
    """Major version of Postgres: 16 or 18."""
    spark: bool = True
    port: int = 8083
    """Port of the page; if it is in use, the demo uses the next free port."""
    jars: tuple[str, ...] = ()
    cluster: SearchCluster | None = None
    """Cluster with the search indexes; None for a local index."""
    with_views: bool = False
    """Whether two views are computed and applied to sinks of their own."""

    @property
    def processes(self) -> tuple[str, ...]:
        """Return the names of the processes that the demo starts."""
        return ("reader", "server", "apply") if self.spark else ("reader", "server")

    @property
    def sinks(self) -> tuple[str, ...]:
        """Return the names of the sinks that the demo fills from the start."""
        of_views = (DOCUMENTS, MARTS) if self.with_views else ()
        return (LAKE, SEARCH, *of_views) if self.spark else ()


def play(settings: DemoSettings, screen: Terminal, stop: Event, warm: WarmProcess | None) -> DemoReport:
    """Run the demo until `stop` is set or its seconds are over; then remove its state, unless `keep` is set.

    The processes of the pipeline are forked from `warm`, if it is not None.
    Raises ChildFailed if a process ends unexpectedly, PositionNotReached if a sink does not catch up.
    """
    with ExitStack() as stack:
        workspace = stack.enter_context(open_workspace(settings.folder, keep=settings.keep))
        screen.say(f"  state in {workspace.state} ({'kept' if settings.keep else 'removed on exit; keep with --keep'})")
        stack.enter_context(search_cluster(settings.cluster, screen, keep=settings.keep))
        dsn = stack.enter_context(_database(settings, workspace, screen))
        port = _page_port(settings, screen)
        search = None if settings.cluster is None else settings.cluster.keys(workspace.state)
        workspace.define(dsn, port, settings.jars, search, with_views=settings.with_views)
        children = stack.enter_context(DemoProcesses.of_pipeline(workspace, settings.processes, warm))
        probe = PipelineProbe(workspace)
        stack.callback(probe.close)
        return LivePhase(DemoContext(settings, screen, workspace, dsn, port), children, probe, stop).play()


@contextmanager
def _database(settings: DemoSettings, workspace: Workspace, screen: Terminal) -> Iterator[str]:
    with EmbeddedPostgres(workspace.postgres, version=settings.version, port=POSTGRES_PORT) as server:
        with connect(server.dsn("postgres"), application_name="cdc demo") as connection:
            connection.execute("CREATE DATABASE shop")
        dsn = server.dsn("shop")
        psql = f"psql {quote(dsn)}"
        screen.done("postgres", f"{settings.version} on a private socket (wal_level=logical)   {psql}")
        make_shop(dsn)
        screen.done("shop", f"7 tables with rows that the pipeline copies first   {psql} -c '\\d shop.*'")
        yield dsn
    screen.done("postgres", "stopped")


def _page_port(settings: DemoSettings, screen: Terminal) -> int:
    port = free_port(settings.port)
    if port != settings.port:
        screen.say(
            f"⚠ page       port {settings.port} is in use, so the demo uses {port}   to choose: cdc demo --port N"
        )
    return port
