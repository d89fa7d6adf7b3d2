"""`cdc demo`: run the whole product on an embedded Postgres and verify every target at the end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from importlib.metadata import version as installed
from io import TextIOWrapper
from pathlib import Path
from time import monotonic
from types import FrameType
from typing import Annotated

import typer

from cdc.command_output import echo, emit
from cdc.errors import ExitCode, InvalidDefinition

INTERRUPTED = 128 + signal.SIGINT


def register(app: typer.Typer) -> None:
    """Add the command `demo` to the app."""
    app.command()(demo)


def demo(  # noqa: PLR0913, PLR0917 - the options of the command
    seconds: Annotated[
        float | None,
        typer.Option(min=1, help="Stop after this many seconds of workload; without it the demo runs until ^C."),
    ] = None,
    rate: Annotated[float, typer.Option(min=1, help="Make this many changes per second.")] = 200.0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON envelope on the last line; progress goes to standard error.")
    ] = False,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the files of the demo after it ends.")] = False,
    pg: Annotated[int, typer.Option(help="Run this major version of the embedded Postgres: 16 or 18.")] = 18,
    no_spark: Annotated[
        bool,
        typer.Option(
            "--no-spark",
            help="Run without Spark: start only the reader, 'cdc tail' and the status page, and fill no targets.",
        ),
    ] = False,
    port: Annotated[int, typer.Option(help="Serve the status page at this port, or at the next free port.")] = 8083,
    opensearch: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Put the search indexes into the OpenSearch cluster at this URL instead of a local directory, and "
            "remove them at the end. With https://USER@HOST the password is read from OPENSEARCH_PASSWORD.",
        ),
    ] = None,
    views: Annotated[
        bool,
        typer.Option(
            "--views", help="Also derive two views by SQL: documents of orders in a search index, and revenue per day."
        ),
    ] = False,
    delta_jars: Annotated[
        str,
        typer.Option(
            help="Use these jars of Delta, separated by commas [default: jars from the Ivy cache or Maven Central]."
        ),
    ] = "",
) -> None:
    """Run the whole pipeline on an embedded Postgres.

    The demo writes changes to the database of a shop until you stop it. Then it compares every target with the source.
    """
    began = monotonic()
    out = sys.stderr if json else sys.stdout
    if isinstance(out, TextIOWrapper):
        out.reconfigure(errors="replace")  # a terminal without ✓ is no reason to stop
    echo(
        f"  0.0s  cdc {installed('cdc')} · demo · ^C stops it and verifies, ^C twice ends it at once",
        to=out,
        flush=True,
    )
    if pg not in (16, 18):
        raise InvalidDefinition(f"--pg {pg!r} is not supported: expected 16 or 18")
    if opensearch is not None and no_spark:
        raise InvalidDefinition("--opensearch has no effect with --no-spark: omit one of them")
    if views and no_spark:
        raise InvalidDefinition("--views has no effect with --no-spark: omit one of them")
    stop = _stop_on_signals()

    from cdc.service.pipeline_children import warm_process

    jars = tuple(os.path.abspath(jar) for jar in delta_jars.split(",") if jar)  # noqa: PTH100 - a jar may be a link
    with warm_process() as warm:  # before the imports below, during which it imports as well
        from cdc.demo.run import DemoSettings, play
        from cdc.demo.search_cluster import SearchCluster
        from cdc.demo.terminal import Terminal

        settings = DemoSettings(
            folder=Path.cwd(),
            seconds=seconds,
            rate=rate,
            keep=keep,
            version=pg,
            spark=not no_spark,
            port=port,
            jars=jars,
            cluster=None if opensearch is None else SearchCluster.of(opensearch, os.environ),
            with_views=views,
        )
        screen = Terminal(out, began)
        try:
            outcome = play(settings, screen, stop, warm)
        except KeyboardInterrupt:
            screen.failed("stopped", "by a second ^C")
            raise typer.Exit(INTERRUPTED) from None
    summary = outcome.summary
    screen.done("bye", summary) if outcome.equal else screen.failed("bye", summary)
    if json:
        emit("demo", json=True, summary=summary, result=outcome.to_json(), ok=outcome.equal)
    if outcome.tables and not outcome.equal:
        raise typer.Exit(ExitCode.FINDING)
    if not outcome.tables and not stop.is_set():
        raise typer.Exit(ExitCode.RUNTIME)


def _stop_on_signals() -> threading.Event:
    """Return an event that the first SIGINT, SIGTERM or SIGHUP sets; a second signal raises KeyboardInterrupt."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    return stop
