"""Remedy: the next step of an error with its commands as they can be copied, names and definition in them."""

from __future__ import annotations

import re
import shlex
from typing import Final

RESYNC: Final = "have it copied again: 'cdc tables resync TABLE'"
"""Of a table whose changes cannot be followed any more."""
COMMAND: Final = re.compile(r"'(cdc [^']*)'")
"""A command in a remedy: in single quotes, with SINK, TABLE and FILE where one of those is meant."""
_SPECIAL: Final = re.compile(r'([\\"$`])')
_WITHOUT: Final = ("cdc config", "cdc demo", "cdc explain", "cdc version")
"""Those that take no definition."""


def literal(remedy: str, *, sink: str | None = None, topic: str | None = None, file: str | None = None) -> str:
    """The remedy for this sink and table under this definition; what is None stays as it is."""
    return COMMAND.sub(lambda match: f"'{_of(_named(match[1], sink, topic), file)}'", remedy)


def _named(command: str, sink: str | None, topic: str | None) -> str:
    known = {"SINK": sink, "TABLE": topic}
    return " ".join(_word(known.get(word) or word) if word in known else word for word in command.split(" "))


def _of(command: str, file: str | None) -> str:
    if file is None or command.startswith(_WITHOUT) or command.endswith(" --help"):
        return command
    if command == "cdc validate":
        return f"{command} {_word(file)}"
    if "-c FILE" in command:
        return command.replace("-c FILE", f"-c {_word(file)}")
    return command if " -c " in command else f"{command} -c {_word(file)}"


def _word(text: str) -> str:
    """One word of a shell, in double quotes if it needs any: a name is data, and nothing in it is to be run."""
    return text if shlex.quote(text) == text else '"' + _SPECIAL.sub(r"\\\1", text) + '"'
