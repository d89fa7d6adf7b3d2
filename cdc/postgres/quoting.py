"""Quoting for replication commands, which accept no parameters and have their own grammar.

The grammar (`repl_scanner.l`) has no backslash escapes: a doubled quote is the only escape.
"""

from __future__ import annotations

from collections.abc import Sequence

from cdc.errors import InvalidDefinition


def identifier(name: str) -> str:
    """`"name"`; raises InvalidDefinition for an empty name or a zero byte."""
    if not name or "\0" in name:
        raise InvalidDefinition(f"malformed name: expected text without a zero byte, got {name!r}")
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """`'text'`; raises InvalidDefinition for a zero byte."""
    if "\0" in text:
        raise InvalidDefinition(f"malformed text: expected no zero byte, got {text!r}")
    return "'" + text.replace("'", "''") + "'"


def publication_names(names: Sequence[str]) -> str:
    """The value of pgoutput's `publication_names`: a list of identifiers inside one literal."""
    return literal(",".join(identifier(name) for name in names))
