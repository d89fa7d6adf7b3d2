"""The demo's SQL and definition, read from the files in this package."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)\n(?:--.*\n)+", re.MULTILINE)


def script_text(name: str) -> str:
    """The text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def script(name: str) -> bytes:
    """All statements of a file, for one `execute` without parameters."""
    return script_text(f"{name}.sql").encode()


def named_statements(name: str) -> dict[str, bytes]:
    """The statements of a file by their `-- name:` lines."""
    pieces = _NAME.split(script_text(f"{name}.sql"))[1:]
    return {title: text.strip().encode() for title, text in zip(pieces[::2], pieces[1::2], strict=True)}
