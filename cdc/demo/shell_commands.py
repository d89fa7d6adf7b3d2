"""Hints: commands and paths as a person can paste them into a shell in the folder where the demo was started."""

from __future__ import annotations

import os
import shlex
from pathlib import Path


def display_path(path: Path) -> str:
    """The path, relative to the working directory if it lies below, quoted for a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def cdc_command(arguments: str, definition: Path) -> str:
    """`cdc WORDS` on a definition, through uv where the demo itself was started by it."""
    launcher = "uv run cdc" if "UV" in os.environ else "cdc"
    return f"{launcher} {arguments} -c {display_path(definition)}"
