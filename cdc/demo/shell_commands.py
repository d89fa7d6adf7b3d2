"""Commands and paths that a person can paste into a shell in the folder where the demo was started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def display_path(path: Path) -> str:
    """The path, relative to the working directory if it is below it, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def cdc_command(arguments: str, definition: Path) -> str:
    """`cdc ARGUMENTS` with the definition, run by uv if the demo was."""
    launcher = "uv run cdc" if "UV" in os.environ else "cdc"
    return f"{launcher} {arguments} -c {display_path(definition)}"
