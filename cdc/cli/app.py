"""The typer application: every group of commands, registered in the order of the help page."""

from __future__ import annotations

import inspect
from typing import Annotated, Final

import typer

from cdc.cli import (
    backfill,
    config,
    consumers,
    demo,
    dlq,
    doctor,
    log,
    migrate,
    query,
    replay,
    run,
    search,
    slots,
    source,
    spark,
    tables,
    validate,
    verify,
)
from cdc.cli.output import JsonOption, echo, emit
from cdc.errors import CdcError, ConfigError, every_error

GROUPS: Final = (
    demo,
    validate,
    doctor,
    run,
    backfill,
    tables,
    slots,
    source,
    log,
    consumers,
    query,
    search,
    verify,
    dlq,
    replay,
    spark,
    migrate,
    config,
)
"""Modules with `register(app)`."""

app: Final = typer.Typer(
    name="cdc",
    help="Change data capture for Postgres: one ordered log, every other store derived from it.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

for group in GROUPS:
    group.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        echo(f"cdc {_version()}")
        raise typer.Exit


@app.callback()
def _root(
    _version_flag: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def version(json: JsonOption = False) -> None:
    """Print the version."""
    if json:
        emit("version", json=True, summary=f"cdc {_version()}", result={"version": _version()})
    else:
        echo(f"cdc {_version()}")


@app.command()
def explain(
    code: Annotated[str | None, typer.Argument(help="For example CDC-2104; without it all codes are listed.")] = None,
    json: JsonOption = False,
) -> None:
    """Say what an error code means, what the processes do about it, and what you can do."""
    errors = {error.code: error for error in every_error()}
    if code is not None and code.upper() not in errors:
        raise ConfigError(f"no error has the code {code!r}", remedy="run 'cdc explain' for all codes")
    pages = [_page(error) for known, error in sorted(errors.items()) if code is None or known == code.upper()]
    if json:
        emit("explain", json=True, summary=f"{len(pages)} codes", result=pages if code is None else pages[0])
    elif code is None:
        for page in pages:
            echo(page["code"], page["name"], page["meaning"].partition("\n")[0], sep="  ")
    else:
        echo(*(f"{name + ':':10}{value}" for name, value in pages[0].items()), sep="\n")


def _page(error: type[CdcError]) -> dict[str, str]:
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
