"""Options and functions that several commands share: --config, --json, --yes, confirmation, audit entries, pauses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc.command_output import LineMark, emit, line
from cdc.errors import CdcError, ConfigError

if TYPE_CHECKING:
    from cdc.catalog.pause_requests import PauseRequests
    from cdc.config import Definition

ConfigOption = Annotated[
    Path,
    typer.Option(
        "--config", "-c", envvar="CDC_CONFIG", help="Read the pipeline from this definition file.", show_default=True
    ),
]
"""Option --config of a command; its default is `DEFAULT_CONFIG`."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as one JSON envelope.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]

WaitOption = Annotated[
    str, typer.Option("--timeout", help="Wait at most this long for --min-position, for example 500ms or 1m.")
]
"""Option --timeout of a command that can wait for a position; `parse_seconds` parses it."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """How the application was started; typer's context stores it as `obj`."""

    owns_process: bool
    """True if the process runs nothing else, so that `cdc query` may deny file writes to the whole process."""


def parse_seconds(text: str, option: str) -> float:
    """Return the seconds of a duration with its unit; `option` is the name of the option that has the text."""
    from pydantic_core import PydanticCustomError

    from cdc.config.units import seconds

    try:
        return seconds(text)
    except PydanticCustomError as error:
        raise typer.BadParameter(error.message(), param_hint=option) from error


def confirm(what: str, *, yes: bool) -> None:
    """Ask for confirmation, unless `yes` is true; exit if the person refuses.

    Raises ConfigError if standard input is no terminal.
    """
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"cannot ask for confirmation without a terminal: {what}", remedy="add --yes")
    typer.confirm(f"{what}?", abort=True)


def audit(definition: Definition, action: str, subject: str, detail: dict[str, Any], *, json: bool) -> None:
    """Write an audit entry for an action that has succeeded; an unreachable catalog causes only a warning.

    With `json`, the warning is not printed.
    """
    from getpass import getuser

    from cdc.catalog import Catalog

    try:
        with Catalog.open(definition.catalog.url) as catalog:
            catalog.audit.write(getuser(), action, subject, detail)
    except CdcError as error:
        if not json:
            line(LineMark.ADVICE, f"cannot record this command in the audit log: {error.message}", fix=error.fix)


def change_pause(definition: Definition, requests: PauseRequests, command: str, name: str, *, json: bool) -> None:
    """Carry out a command such as `views pause`, whose last word is `pause` or `resume`, and print its result."""
    from getpass import getuser

    from cdc.catalog import Catalog

    pauses = command.endswith(" pause")
    act = requests.pause if pauses else requests.resume
    with Catalog.open(definition.catalog.url) as catalog:
        changed = act(catalog, definition.name, name, getuser())
    state = "paused" if pauses else "running"
    summary = f"{requests.subject} {name!r} is {state}" + ("" if changed else " already")
    emit(command, json=json, summary=summary, result={requests.subject: name, "changed": changed})
