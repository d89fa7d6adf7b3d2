"""Completion of remedies: commands get the definition file, the sink and the table, so that they can be copied."""

from __future__ import annotations

import re
import shlex
from typing import Final

RESYNC: Final = "copy the table again: 'cdc tables resync TABLE'"
"""Remedy for a table whose changes can no longer be followed."""
COMMAND: Final = re.compile(r"'(cdc [^']*)'")
"""A command in a remedy, in single quotes; SINK, TABLE and FILE are placeholders."""
_SPECIAL: Final = re.compile(r'([\\"$`])')
_WITHOUT: Final = ("cdc config", "cdc demo", "cdc explain", "cdc version")
"""Commands without a definition file."""


def complete_remedy(remedy: str, *, sink: str | None = None, topic: str | None = None, file: str | None = None) -> str:
    """The remedy with its placeholders replaced; a placeholder whose value is None stays."""
    return COMMAND.sub(lambda match: f"'{_with_definition(_with_names(match[1], sink, topic), file)}'", remedy)


def _with_names(command: str, sink: str | None, topic: str | None) -> str:
    names = {"SINK": sink, "TABLE": topic}
    return " ".join(_shell_word(names.get(word) or word) if word in names else word for word in command.split(" "))


def _with_definition(command: str, file: str | None) -> str:
    if file is None or command.startswith(_WITHOUT) or command.endswith(" --help"):
        return command
    if command == "cdc validate":
        return f"{command} {_shell_word(file)}"
    if "-c FILE" in command:
        return command.replace("-c FILE", f"-c {_shell_word(file)}")
    return command if " -c " in command else f"{command} -c {_shell_word(file)}"


def _shell_word(text: str) -> str:
    """The text as one shell word, in double quotes where needed, so that a shell executes nothing in a name."""
    return text if shlex.quote(text) == text else '"' + _SPECIAL.sub(r"\\\1", text) + '"'
