"""`cdc source`: the optional event triggers in the watched database, by which column ids are told, not concluded."""

from __future__ import annotations

from typing import Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.terminal_output import echo_source, emit

PrintOption = Annotated[bool, typer.Option("--print", help="Print the SQL for somebody with the right to run it.")]

_app = typer.Typer(help="Make or take away the event triggers in the watched database.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the group."""
    app.add_typer(_app, name="source")


@_app.command()
def install(config: ConfigOption = DEFAULT_CONFIG, show: PrintOption = False, json: JsonOption = False) -> None:
    """Make the event triggers that write every change of a table's shape into the WAL; may be run again.

    Needs a role that may make event triggers. Waits for the transactions that are open.
    """
    _run_script(config, "install", show=show, json=json)


@_app.command()
def remove(config: ConfigOption = DEFAULT_CONFIG, show: PrintOption = False, json: JsonOption = False) -> None:
    """Take the event triggers away; the reader concludes from the catalogue again."""
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
    done = "made" if name == "install" else "taken away"
    emit(f"source {name}", json=json, summary=f"event triggers of {definition.name!r} {done}", result={})
