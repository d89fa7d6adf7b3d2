"""Array literals: parses and prints arrays with one dimension in the text form of Postgres.

Section 8.15.6 of the Postgres manual says how elements are quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import pyarrow as pa

_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{}",\\]+)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NULL: Final = "NULL"
_QUOTED: Final = re.compile(r'\A\Z|[{},"\\ \t\n\r\v\f]|\A[nN][uU][lL][lL]\Z')
"""Pattern of elements that Postgres quotes: empty texts, the word NULL, and texts with special characters."""


def parse_array(text: str) -> list[str | None]:
    """Return the elements of an array literal with one dimension. Raises pyarrow.ArrowInvalid for any other text."""
    if text == "{}":
        return []
    found: list[str | None] = []
    at = 1 if text.startswith("{") else len(text)
    while (element := _ELEMENT.match(text, at)) is not None:
        quoted, bare = element.groups()
        found.append(_ESCAPED.sub(r"\1", quoted) if bare is None else None if bare == _NULL else bare)
        at = element.end() + 1
        if text[element.end() :] == "}":
            return found
        if text[element.end() : at] != ",":
            break
    raise pa.ArrowInvalid("expected array text with one dimension that begins at 1")


def array_literal(elements: Iterable[str | None]) -> str:
    """Return the array literal that Postgres prints for these elements."""
    return "{" + ",".join(_NULL if text is None else _quoted(text) for text in elements) + "}"


def _quoted(text: str) -> str:
    if _QUOTED.search(text) is None:
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
