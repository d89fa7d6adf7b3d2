"""`cdc source`: event triggers at the source that write column identities into the WAL.

The triggers are optional. Without them the reader infers from the system catalogs of Postgres which column was
renamed, dropped or added.
"""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import echo_source, emit

PrintOption = Annotated[
    bool, typer.Option("--print", help="Print the SQL instead of running it, so that another role can run it.")
]

_app = typer.Typer(help="Install or remove event triggers in the source database.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the command group `source` to the app."""
    app.add_typer(_app, name="source")


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
