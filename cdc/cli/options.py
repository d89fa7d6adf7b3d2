"""Options that many commands share, and the context object of an invocation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path,
    typer.Option("--config", "-c", envvar="CDC_CONFIG", help="Definition file of the pipeline.", show_default=True),
]
"""Its default is `DEFAULT_CONFIG`."""
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON envelope.")]


@dataclass(frozen=True, slots=True)
class Invocation:
    """How the application was started; the `obj` of typer's context."""

    owns_process: bool
    """Whether the process runs this command only, so that the command may restrict the process."""
