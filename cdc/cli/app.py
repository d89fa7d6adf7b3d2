"""The typer application: its commands, and the module that defines each command.

Importing every module takes longer than most commands run. A command line that begins with a command therefore imports
only that command's module. The help page, shell completion and a misspelt command import all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated, Final

import typer

from cdc.cli.options import JsonOption
from cdc.command_output import echo, emit
from cdc.errors import CdcError, ConfigError, all_error_classes

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    "demo": ("demo",),
    "validate": ("validate",),
    "doctor": ("doctor",),
    "run": ("run", "reader", "server"),
    "status": ("status",),
    "backfill": ("backfill",),
    "tables": ("tables",),
    "slots": ("slots",),
    "source": ("source",),
    "log_changes": ("log", "tail"),
    "consumers": ("consumers",),
    "query": ("query",),
    "search": ("search",),
    "indexes": ("indexes",),
    "deliveries": ("deliveries", "deliver"),
    "views": ("views",),
    "verify": ("verify",),
    "dlq": ("dlq",),
    "replay": ("replay",),
    "spark": ("spark",),
    "migrate": ("migrate",),
    "config": ("config",),
}
"""Modules of `cdc.cli` in the order of the help page, each with the commands that its function `register` adds."""


def application(word: str | None = None) -> typer.Typer:
    """Build the application with only the module of the command `word`, or with all modules if `word` is no command."""
    app = typer.Typer(
        name="cdc",
        help="Capture changes of Postgres tables in one ordered log, and apply it to Delta tables and search indexes.",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for module in _modules_of(word):
        import_module(f"cdc.cli.{module}").register(app)
    app.command()(version)
    app.command()(explain)
    return app


def _modules_of(word: str | None) -> list[str]:
    if word in {"version", "explain"}:
        return []
    return [module for module, commands in COMMANDS.items() if word in commands] or list(COMMANDS)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"cdc {_version()}")
        raise typer.Exit


def _root(
    _version_flag: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def version(json: JsonOption = False) -> None:
    """Print the version of cdc."""
    if json:
        emit("version", json=True, summary=f"cdc {_version()}", result={"version": _version()})
    else:
        echo(f"cdc {_version()}")


def explain(
    code: Annotated[
        str | None,
        typer.Argument(help="Explain this error code, for example CDC-2104; without a code, list all codes."),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Explain an error code, or list all codes.

    For one code the command prints its meaning, how the processes react, and what to do.
    """
    errors = {error.code: error for error in all_error_classes()}
    if code is not None and code.upper() not in errors:
        raise ConfigError(f"no error has the code {code!r}", remedy="run 'cdc explain' to list all codes")
    pages = [_error_fields(error) for known, error in sorted(errors.items()) if code is None or known == code.upper()]
    if json:
        emit("explain", json=True, summary=f"{len(pages)} codes", result=pages if code is None else pages[0])
    elif code is None:
        for page in pages:
            echo(page["code"], page["name"], page["meaning"].partition("\n")[0], sep="  ")
    else:
        echo(*(f"{name + ':':10}{value}" for name, value in pages[0].items()), sep="\n")


def _error_fields(error: type[CdcError]) -> dict[str, str]:
    return {
        "code": error.code,
        "name": error.__name__,
        "meaning": inspect.cleandoc(error.__doc__ or ""),
        "reaction": error.reaction.value,
        "exit": str(error.exit_code.value),
        "remedy": error.remedy,
    }


def _version() -> str:
    from importlib.metadata import version as installed

    return installed("cdc")
