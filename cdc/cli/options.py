"""Options that many commands have, and how the application was started."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", envvar="CDC_CONFIG", help="The definition.", show_default=True)
]
"""Give it the default `DEFAULT_CONFIG`."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON envelope.")]


@dataclass(frozen=True, slots=True)
class Invocation:
    """How the application was started; the `obj` of its context."""

    owns_process: bool
    """Whether the process is for this one command, which may then restrict it."""
