"""`cdc run` and two of its child processes: `cdc reader` and `cdc server`."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import LineMark, emit, fail, line
from cdc.errors import ChildFailed, ExitCode

if TYPE_CHECKING:
    from cdc.service.warm_process import WarmProcess

SERVER_NICE_INCREMENT: Final = 5
"""Amount by which the nice value of the server is increased: its start takes seconds of CPU, in which reader and apply
process want to begin, and its answers may wait for them later.
"""


class ProcessName(StrEnum):
    """A child process of `cdc run`."""

    #: Captures the changes of Postgres into the log.
    READER = "reader"
    #: Fills the sinks from the log; needs Java.
    APPLY = "apply"
    #: Sends the log's changes as events, if the definition has deliveries.
    DELIVER = "deliver"
    #: Serves API, page and metrics.
    SERVER = "server"


class LogLineFormat(StrEnum):
    """Format of process logs."""

    #: For people.
    CONSOLE = "console"
    #: One object per line.
    JSON = "json"


FormatOption = Annotated[
    LogLineFormat, typer.Option("--log-format", envvar="CDC_LOG_FORMAT", help="Write the process log in this format.")
]


def register(app: typer.Typer) -> None:
    """Add the commands `run`, `reader` and `server` to the app; the help page omits `reader` and `server`."""
    app.command()(run)
    app.command(hidden=True)(reader)
    app.command(hidden=True)(server)


def run(
    config: ConfigOption = DEFAULT_CONFIG,
    only: Annotated[list[ProcessName] | None, typer.Option(help="Start only this process; may be repeated.")] = None,
    json: JsonOption = False,
) -> None:
    """Run reader, apply process, server and deliveries on this machine.

    The command restarts each child process that fails. After an error that an operator must correct, it restarts
    the process every five minutes. It restarts this process at once when the definition changes, a cdc command
    writes an audit entry, or SIGUSR1 arrives.

    ^C and SIGTERM let each process finish its batch; a second ^C ends all processes at once. With snapshot.mode
    initial_only the reader exits after the copy of all tables, and the other processes continue.
    """
    parts = [part.value for part in only or []]
    from cdc.service.pipeline_children import warm_process

    with warm_process(parts) as warm:  # before the imports of `_supervise`, during which it imports as well
        _supervise(config, parts, warm, json=json)


def _supervise(config: Path, parts: Sequence[str], warm: WarmProcess | None, *, json: bool) -> None:
    from cdc.config import load_definition
    from cdc.config.source import SnapshotMode
    from cdc.service.pipeline_children import pipeline_children
    from cdc.service.restart_policy import RestartTriggers
    from cdc.service.supervisor import Supervisor

    definition = load_definition(config)
    copies_only = definition.snapshot.mode is SnapshotMode.INITIAL_ONLY
    if (exposure := definition.service.exposure) is not None and (not parts or ProcessName.SERVER in parts):
        raise exposure
    triggers = RestartTriggers(config, definition.catalog.url)
    delivers = any(not delivery.is_run_by_hand for delivery in definition.deliveries)
    children = pipeline_children(str(config.resolve()), parts, copies_only=copies_only, delivers=delivers)
    supervisor = Supervisor(children, triggers=triggers, warm=warm)
    supervisor.handle_signals()
    if not json:
        line(LineMark.GOOD, f"running {definition.name!r}, ^C stops it", fix=f"cdc status -c {config}")
    try:
        code = supervisor.run()
    except ChildFailed as failed:
        fail("run", failed, json=json)
        raise typer.Exit(ExitCode.USAGE.value) from failed  # the exit status of the child, which printed why
    if code:
        raise typer.Exit(code)
    emit("run", json=json, summary=f"stopped {definition.name!r}", result={"restarts": supervisor.restarts})


def reader(config: ConfigOption = DEFAULT_CONFIG, log_format: FormatOption = LogLineFormat.CONSOLE) -> None:
    """Capture changes from Postgres into the log; `cdc run` starts this process."""
    from cdc.allocators import use_system_allocators
    from cdc.import_guard import refuse_pandas

    refuse_pandas()
    from cdc.capture.reader_process import main
    from cdc.config import load_definition
    from cdc.logging_setup import LogFormat, configure

    configure(LogFormat(log_format.value), file=str(config))
    use_system_allocators()
    raise typer.Exit(main(load_definition(config), reload=lambda: load_definition(config)))


def server(
    context: typer.Context,
    config: ConfigOption = DEFAULT_CONFIG,
    log_format: FormatOption = LogLineFormat.CONSOLE,
    strict_port: Annotated[
        bool, typer.Option("--strict-port", help="Fail if the port is in use, instead of using the next free port.")
    ] = False,
) -> None:
    """Serve the API, the metrics and the status page; `cdc run` starts this process."""
    from cdc.thread_priority import lower_thread_priority

    if context.obj.owns_process:
        lower_thread_priority(SERVER_NICE_INCREMENT)  # before the imports below, which take most of the start
    from cdc.config import load_definition
    from cdc.logging_setup import LogFormat, configure
    from cdc.service.api.server_process import main

    configure(LogFormat(log_format.value), file=str(config))
    raise typer.Exit(main(load_definition(config), config.resolve(), strict_port=strict_port))
