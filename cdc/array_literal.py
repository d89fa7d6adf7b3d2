"""Array literals: parses and prints arrays with one dimension in the text form of Postgres; the types of arrays.

Section 8.15.6 of the Postgres manual says how elements are quoted.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

import pyarrow as pa

ELEMENT_BY_OID: Final = {
    1000: 16,
    1001: 17,
    1005: 21,
    1007: 23,
    1016: 20,
    1021: 700,
    1022: 701,
    1028: 26,
    1115: 1114,
    1182: 1082,
    1185: 1184,
    1231: 1700,
}
"""OID of an array type → OID of its element type, for element types that are not text (pg_type.dat)."""
TEXT_ELEMENT_BY_OID: Final = {1002: 18, 1003: 19, 1009: 25, 1014: 1042, 1015: 1043, 2951: 2950}
"""The same for "char", name, text, char(n), varchar and uuid.

The name of an array type ends with `[]`, but the name of a domain over an array does not. So a domain over one of these
arrays is recognised by the OID of its base type.
"""
BOX_ARRAY_OID: Final = 1020
"""OID of box[], the only array type with semicolons between its elements; such a column stays text."""
_TEXT_OID: Final = 25
_SCALARS: Final = frozenset({BOX_ARRAY_OID, _TEXT_OID, *ELEMENT_BY_OID.values()})
_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{}",\\]+)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NULL: Final = "NULL"
_QUOTED: Final = re.compile(r'\A\Z|[{},"\\ \t\n\r\v\f]|\A[nN][uU][lL][lL]\Z')
"""Pattern of elements that Postgres quotes: empty texts, the word NULL, and texts with special characters."""


def element_type(oid: int, type_name: str) -> int | None:
    """Return the OID of the type of an array's elements; that of text if they are texts; None for other types.

    oid, type_name: the array type; for a domain, the OID of its base type.
    """
    if oid in ELEMENT_BY_OID:
        return ELEMENT_BY_OID[oid]
    # format_type ends the name of an array type with brackets, and quotes a name that has brackets itself
    is_text_array = oid in TEXT_ELEMENT_BY_OID or (type_name.endswith("[]") and oid not in _SCALARS)
    return _TEXT_OID if is_text_array else None


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
