"""Destructive: what commands that take something away have in common: they ask first, and are written down."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc.errors import CdcError, ConfigError
from cdc.terminal_output import LineMark, line

if TYPE_CHECKING:
    from cdc.config import Definition

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


def confirm(what: str, *, yes: bool) -> None:
    """Ask whether to do it; leaves if not, raises ConfigError where nobody can be asked."""
    import sys

    if yes:
        return
    if not sys.stdin.isatty():
        raise ConfigError(f"nobody to ask whether to {what}", remedy="add --yes")
    typer.confirm(f"{what}?", abort=True)


def audit(definition: Definition, action: str, subject: str, detail: dict[str, Any], *, json: bool) -> None:
    """Write down who did it; the work is done, so a catalog that is away is only spoken of."""
    from getpass import getuser

    from cdc.catalog import Catalog

    try:
        with Catalog.open(definition.catalog.url) as catalog:
            catalog.audit.write(getuser(), action, subject, detail)
    except CdcError as error:
        if not json:
            line(LineMark.ADVICE, f"not audited: {error.message}", fix=error.fix)
