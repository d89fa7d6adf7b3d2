"""Runs the demo from start to end: database, pipeline, workload, verification."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from shlex import quote
from threading import Event

from cdc.demo.live_phase import DemoContext, LivePhase
from cdc.demo.pipeline_probe import PipelineProbe
from cdc.demo.processes import DemoProcesses
from cdc.demo.report import DemoReport
from cdc.demo.settings import Settings
from cdc.demo.terminal import Terminal
from cdc.demo.workload import make_shop
from cdc.demo.workspace import POSTGRES_PORT, Workspace, free_port, open_workspace
from cdc.postgres.connection import connect
from cdc.postgres.embedded import EmbeddedPostgres
from cdc.service.supervisor import pipeline_children


def play(settings: Settings, screen: Terminal, stop: Event) -> DemoReport:
    """Run the demo until `stop` is set or its seconds are over, and remove its state unless it is to be kept.

    Raises ChildFailed if a process ends by itself, PositionNotReached if a sink does not catch up.
    """
    with ExitStack() as stack:
        workspace = stack.enter_context(open_workspace(settings.folder, keep=settings.keep))
        screen.say(f"  state in {workspace.state} ({'kept' if settings.keep else 'removed on exit; keep with --keep'})")
        dsn = stack.enter_context(_database(settings, workspace, screen))
        port = _page_port(settings, screen)
        workspace.define(dsn, port, settings.jars)
        processes = ("reader", "server", "apply") if settings.spark else ("reader", "server")
        children = stack.enter_context(
            DemoProcesses(workspace, pipeline_children(str(workspace.definition), processes))
        )
        probe = PipelineProbe(workspace)
        stack.callback(probe.close)
        return LivePhase(DemoContext(settings, screen, workspace, dsn, port), children, probe, stop).play()


@contextmanager
def _database(settings: Settings, workspace: Workspace, screen: Terminal) -> Iterator[str]:
    with EmbeddedPostgres(workspace.postgres, version=settings.version, port=POSTGRES_PORT) as server:
        with connect(server.dsn("postgres"), application_name="cdc demo") as connection:
            connection.execute("CREATE DATABASE shop")
        dsn = server.dsn("shop")
        psql = f"psql {quote(dsn)}"
        screen.done("postgres", f"{settings.version} on a private socket (wal_level=logical)   {psql}")
        make_shop(dsn)
        screen.done("shop", f"7 tables of rows that were there before   {psql} -c '\\d shop.*'")
        yield dsn
    screen.done("postgres", "stopped")


def _page_port(settings: Settings, screen: Terminal) -> int:
    port = free_port(settings.port)
    if port != settings.port:
        screen.say(f"⚠ page       port {settings.port} is in use, taking {port}   choose another: cdc demo --port N")
    return port
