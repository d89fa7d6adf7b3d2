"""Arrays of one dimension: a list of the element's own type, NULL elements included.

The type does not say how many dimensions a value has, nor where its subscripts begin. What a list cannot tell apart
from a plain array, `{{1},{2}}` and `[0:1]={1,2}`, is refused. The manual's section 8.15.6 says how elements are quoted.
"""

from __future__ import annotations

import re
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.types.family import Family

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
"""OIDs of an array type and of its element, for elements that are not text (pg_type.dat)."""
TEXT_ARRAYS: Final = frozenset({1002, 1003, 1009, 1014, 1015, 2951})
"""Arrays of "char", name, text, char(n), varchar and uuid: known by OID, so through a domain as well."""
BOXES: Final = 1020
"""The one array whose elements are parted by semicolons; it stays text."""

_ELEMENT: Final = re.compile(r'"((?:[^"\\]|\\.)*)"|([^{}",\\]+)', re.DOTALL)
_ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
_NULL: Final = "NULL"
_RARE: Final = r'(?s)["\\]|\A\{\}|\A[^{]|.\{|\}.|[^}]\z|\A.?\z'
"""What cannot be split at its commas: quotes, no elements, braces that do not stand at the ends."""


def array_family(element: Family) -> Family:
    """Lists of an element's family; a multi-dimensional value, or one with subscripts of its own, is refused."""
    arrow = pa.list_(pa.field("element", element.arrow))

    def convert(texts: pa.Array) -> pa.Array:
        lists = _lists(texts)
        # ends of the lists; a null list takes none of the elements
        lengths = pc.fill_null(pc.list_value_length(lists), 0)
        ends = pa.concat_arrays([pa.array([0], pa.int32()), pc.cumulative_sum(lengths).cast(pa.int32())])
        values = element.convert(lists.flatten())
        return pa.ListArray.from_arrays(ends, values, type=arrow, mask=pc.is_null(texts) if texts.null_count else None)

    return Family(f"{element.name}[]", arrow, convert)


def _lists(texts: pa.Array) -> pa.Array:
    """Array literals as lists of the elements' texts."""
    quoted = pc.match_substring_regex(texts, _RARE)
    rare = pc.fill_null(quoted, True)
    plain = pc.utf8_slice_codeunits(texts.filter(pc.invert(rare)), 1, -1)
    split = pc.split_pattern(plain, ",").cast(pa.list_(pa.string()))
    flat = split.flatten()
    empty = pc.equal(flat, "")
    if pc.any(empty).as_py():
        raise pa.ArrowInvalid("array text with an empty element")
    held = pa.ListArray.from_arrays(split.offsets, pc.if_else(pc.equal(flat, _NULL), None, flat))
    if plain.offset == 0 and len(plain) == len(texts):
        return held
    parsed = [None if text is None else elements(text) for text in texts.filter(rare).to_pylist()]
    together = pa.concat_arrays([held, pa.array(parsed, pa.list_(pa.string()))])
    return together.take(_places(rare))


def _places(rare: pa.Array) -> pa.Array:
    """Where each row stands once the plain ones come first."""
    late = rare.cast(pa.int64())
    before = pc.subtract(pc.cumulative_sum(late), late)
    rows = pa.array(range(len(rare)), pa.int64())
    plain = len(rare) - (pc.sum(late).as_py() or 0)
    return pc.if_else(rare, pc.add(before, plain), pc.subtract(rows, before))


def elements(text: str) -> list[str | None]:
    """The elements of an array literal of one dimension; raises pyarrow.ArrowInvalid for any other text."""
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
    raise pa.ArrowInvalid("array text of another form than one dimension counted from 1")
