"""`cdc source`: move the pipeline to another server, and event triggers that write column identities into the WAL.

The triggers are optional. Without them the reader infers from the system catalogs of Postgres which column was
renamed, dropped or added.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, audit, confirm
from cdc.command_output import echo_source, emit

MOVE_TO = "CDC_MOVE_TO"
"""Environment variable with the DSN of the new server, as an alternative to the option --to."""
PrintOption = Annotated[
    bool, typer.Option("--print", help="Print the SQL instead of running it, so that another role can run it.")
]

ToOption = Annotated[
    str,
    typer.Option(
        "--to",
        envvar=MOVE_TO,
        metavar="DSN",
        help="Connection string of the new server; a password belongs into the environment variable, not on the "
        "command line.",
    ),
]
CheckOption = Annotated[
    bool, typer.Option("--check", help="Only compare the new server with the log, and print what a move would do.")
]
ResyncOption = Annotated[
    bool,
    typer.Option("--resync", help="Let the reader copy the tables that differ from the log, instead of refusing."),
]

_app = typer.Typer(help="Move to another source server; install or remove event triggers.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group `source` to the app."""
    app.add_typer(_app, name="source")


@_app.command()
def move(  # noqa: PLR0913, PLR0917 - one parameter per option
    to: ToOption,
    config: ConfigOption = DEFAULT_CONFIG,
    check: CheckOption = False,
    resync: ResyncOption = False,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Continue the log on another server: a promoted standby, an upgraded cluster, or a logical replica.

    Stop the writers and the reader first. The command reads the former server to its end, compares every table of the
    new server with the log, and then begins an epoch there without copying equal tables. It prints what it checked,
    proved and did, and the next step. If it is killed, run it again. The exit status is 4 if tables differ.
    """
    import os
    import subprocess
    import sys

    from cdc.config import load_definition

    definition = load_definition(config)
    if not check:
        confirm(f"continue the log of {definition.name!r} on the new server", yes=yes)
    options = [*(["--check"] if check else []), *(["--resync"] if resync else []), *(["--json"] if json else [])]
    command = [sys.executable, "-m", "pipelines", "move", "-c", str(config), *options]
    # a child process: this package does not import the code that compares rows
    status = subprocess.run(command, check=False, env={**os.environ, MOVE_TO: to}).returncode
    if status == 0 and not check:
        audit(definition, "source.move", definition.source.slot.name, {"resync": resync}, json=json)
    raise typer.Exit(status)


@_app.command()
def install(config: ConfigOption = DEFAULT_CONFIG, show: PrintOption = False, json: JsonOption = False) -> None:
    """Install event triggers that write each change of a table's definition (DDL) into the WAL as a logical message.

    The role in source.dsn must be allowed to create event triggers. The command waits until
    open transactions have ended. It is safe to repeat.
    """
    _run_script(config, "install", show=show, json=json)


@_app.command()
def remove(config: ConfigOption = DEFAULT_CONFIG, show: PrintOption = False, json: JsonOption = False) -> None:
    """Remove the event triggers; the reader then detects DDL by querying the system catalogs."""
    _run_script(config, "remove", show=show, json=json)


def _run_script(config: ConfigOption, name: str, *, show: bool, json: bool) -> None:
    from cdc.postgres.ddl_messages import run_trigger_script, trigger_script

    if show:
        if json:
            emit(f"source {name}", json=True, summary=f"{name}.sql", result={"sql": trigger_script(name)})
        else:
            echo_source(trigger_script(name))
        return
    from cdc.config import load_definition

    definition = load_definition(config)
    run_trigger_script(definition.source.dsn.reveal(), name)
    done = "installed" if name == "install" else "removed"
    emit(f"source {name}", json=json, summary=f"event triggers of {definition.name!r} {done}", result={})
