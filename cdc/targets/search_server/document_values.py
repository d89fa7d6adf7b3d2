"""Document values: converts Postgres text to JSON values of search documents, and back to the same text.

The conversion loses nothing. A value that JSON or the field's type cannot represent (`infinity`, `NaN`, a year BC, an
array with two dimensions) is stored as the text that Postgres prints. Its field ignores it in typed queries
(`ignore_malformed`), but the document has it. So no row is refused because of a value, and verification compares the
texts of a document with those of the source.

A JSON value that is no object is stored as `{"_value": …}`, because the field type for JSON accepts only objects. One
that a server would refuse (long texts or numbers, many levels, half a surrogate pair) becomes `{"_text": "…"}`. The
document has it in the field RAW_FIELD, which is not indexed, and null in the field of its column.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from json.encoder import encode_basestring  # type: ignore[attr-defined] # written in C, and missing in the stubs
from typing import Any, Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.array_literal import BOX_ARRAY_OID, ELEMENT_BY_OID, TEXT_ELEMENT_BY_OID, array_literal, parse_array
from cdc.table import Column

NULL: Final = "null"
WRAPPER: Final = "_value"
"""Only key of the object in which a JSON value that is no object is stored."""
RAW: Final = "_text"
"""Only key of the object in which the text of an unusual JSON value is stored."""
RAW_FIELD: Final = "_raw"
"""Field of documents, not indexed: field of a column → unusual JSON value."""
RAW_START: Final = f'{{"{RAW}": '
"""First characters of the JSON of an unusual JSON value."""
LONGEST_TERM: Final = 8_191
"""Maximum characters of a text that is searched as a whole: a term has at most 32,766 bytes."""
MAX_LEVELS: Final = 20
"""Maximum levels of a JSON value that is stored as JSON; Elasticsearch has this limit for flattened fields."""


class Number(str):
    """A JSON number with exactly the digits that the document has."""

    __slots__ = ()


class ValueKind(StrEnum):
    """What a field contains, for its mapping and for the conversion of its values."""

    #: `true` or `false`.
    BOOLEAN = "boolean"
    #: A whole number.
    INTEGER = "integer"
    #: A number with a fraction.
    NUMBER = "number"
    #: A day, as `2026-01-31`.
    DATE = "date"
    #: A time without a zone, as `2026-01-31T12:00:00.5`.
    TIMESTAMP = "timestamp"
    #: A moment, as `2026-01-31T12:00:00.5Z`.
    MOMENT = "moment"
    #: Bytes in base64.
    BYTES = "bytes"
    #: A JSON object.
    JSON = "json"
    #: A point as `POINT (1 2)`.
    POINT = "point"
    #: Text whose words are searched.
    WORDS = "words"
    #: Text that is searched as a whole.
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class ValueType:
    """The kind of a column's values, or of the elements of an array column."""

    kind: ValueKind
    is_array: bool = False

    def __str__(self) -> str:
        return f"{self.kind}[]" if self.is_array else str(self.kind)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the type with this text."""
        return cls(ValueKind(text.removesuffix("[]")), text.endswith("[]"))


_KIND_BY_OID: Final = {
    16: ValueKind.BOOLEAN,
    17: ValueKind.BYTES,
    18: ValueKind.EXACT,
    19: ValueKind.WORDS,
    20: ValueKind.INTEGER,
    21: ValueKind.INTEGER,
    23: ValueKind.INTEGER,
    25: ValueKind.WORDS,
    26: ValueKind.INTEGER,
    114: ValueKind.JSON,
    700: ValueKind.NUMBER,
    701: ValueKind.NUMBER,
    1042: ValueKind.WORDS,
    1043: ValueKind.WORDS,
    1082: ValueKind.DATE,
    1114: ValueKind.TIMESTAMP,
    1184: ValueKind.MOMENT,
    1700: ValueKind.NUMBER,
    3802: ValueKind.JSON,
}
"""OID of a type (pg_type.dat) → kind of its values; values of all other types are EXACT."""
_ARRAYS: Final = {
    array: _KIND_BY_OID[element]
    for array, element in (ELEMENT_BY_OID | TEXT_ELEMENT_BY_OID).items()
    if element in _KIND_BY_OID
}
"""OID of an array type → kind of its elements; elements of other array types are EXACT."""
_JSON_NUMBER: Final = r"-?(?:0|[1-9][0-9]{0,299})(?:\.[0-9]{1,300})?(?:e[+-]?[0-9]{1,3})?"
_TIMESTAMP: Final = r"[0-9]{4}-[0-9]{2}-[0-9]{2} [0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
_ISO: Final = re.compile(r"([0-9]{4}-[0-9]{2}-[0-9]{2})T([0-9:.]+)(Z?)")
_POINT: Final = re.compile(r"\(([^,()]+),([^,()]+)\)")
_WKT: Final = re.compile(r"POINT \((\S+) (\S+)\)")
_UNCONTROLLED: Final = r"\A[^\x00-\x08\x0b\x0c\x0e-\x1f]*\z"
_ESCAPES: Final = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
"""Character → its escape in a JSON string; the backslash is first."""
_PLAIN: Final[Mapping[ValueKind, str]] = {
    ValueKind.INTEGER: rf"\A{_JSON_NUMBER}\z",
    ValueKind.NUMBER: rf"\A{_JSON_NUMBER}\z",
    ValueKind.BOOLEAN: r"\A[tf]\z",
    ValueKind.TIMESTAMP: rf"\A{_TIMESTAMP}\z",
    ValueKind.MOMENT: rf"\A{_TIMESTAMP}\+00\z",
    ValueKind.DATE: _UNCONTROLLED,
    ValueKind.WORDS: _UNCONTROLLED,
    ValueKind.EXACT: _UNCONTROLLED,
}
"""Kind → pattern of the usual texts. A column that has only such texts needs no Python code for each row."""


def value_type(column: Column, field: str | None = None) -> ValueType:
    """Return the type of a column's values; field: the field type that the definition sets for the column."""
    oid, _ = column.value_type
    if field == "geo_point" and column.type_name == "point":
        return ValueType(ValueKind.POINT)
    if column.type_name.rpartition(".")[2] == "citext":
        return ValueType(ValueKind.WORDS)
    if oid in _ARRAYS:
        return ValueType(_ARRAYS[oid], is_array=True)
    if column.type_name.endswith("[]") and oid != BOX_ARRAY_OID and oid not in _KIND_BY_OID:
        return ValueType(ValueKind.EXACT, is_array=True)
    return ValueType(_KIND_BY_OID.get(oid, ValueKind.EXACT))


def to_json(texts: pa.Array, kind: ValueType) -> list[str]:
    """Convert texts of Postgres to JSON texts; NULL becomes `null`."""
    converted: list[str] = json_array(texts, kind).to_pylist()
    return converted


def json_array(texts: pa.Array, kind: ValueType) -> pa.Array:
    """Do the same as `to_json`, and return an Arrow array."""
    if kind.is_array:
        return _by_row(texts, lambda text: _array_json(text, kind.kind))
    pattern = _PLAIN.get(kind.kind)
    if pattern is not None and pc.all(pc.match_substring_regex(texts, pattern), min_count=0).as_py():
        return pc.fill_null(_all_usual(texts, kind.kind), NULL)
    return _by_row(texts, _TO_JSON[kind.kind])


def to_text(value: Any, kind: ValueType) -> str | None:
    """Convert a value of a document, as `parse_document` returns it, to the text that Postgres printed.

    The text of a value of type `json` has no insignificant white space; see `normal_json`.
    """
    if value is None:
        return None
    if kind.is_array and isinstance(value, list):
        return array_literal([to_text(element, ValueType(kind.kind)) for element in value])
    convert = _TO_TEXT.get(kind.kind)
    return str(value) if convert is None or kind.is_array else convert(value)


def parse_document(text: str | bytes) -> dict[str, Any]:
    """Parse the JSON of a document; numbers become `Number`, which keeps their digits."""
    document: dict[str, Any] = json.loads(text, parse_int=Number, parse_float=Number)
    return document


def dump_json(value: Any) -> str:
    """Return the JSON text of a parsed value, as Postgres prints a `jsonb`."""
    if isinstance(value, Number):
        return str(value)
    if isinstance(value, str):
        return str(encode_basestring(value))
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{encode_basestring(key)}: {dump_json(one)}" for key, one in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    return {None: NULL, True: "true", False: "false"}[value]


def normal_json(text: str) -> str:
    """Return a JSON text as `jsonb` would print it, but with its keys in their order and its numbers unchanged.

    Of several equal keys the last one stays. The text of an unusual value is returned unchanged.
    """
    try:
        return dump_json(_usual_json(text))
    except _UnusualJson:
        return text


class _UnusualJson(Exception):
    """A JSON value that a search server would refuse."""


def _usual_json(text: str) -> Any:
    """Parse a JSON text; raise _UnusualJson if a search server would refuse it."""
    try:
        value = json.loads(text, parse_int=_checked_number, parse_float=_checked_number)
    except RecursionError:
        raise _UnusualJson from None
    _check_levels(value, MAX_LEVELS, LONGEST_TERM)
    if "\\ud" in text.lower() and any("\ud800" <= char <= "\udfff" for char in dump_json(value)):
        raise _UnusualJson
    return value


def _checked_number(text: str) -> Number:
    if _NUMBER.fullmatch(text.lower()) is None:
        raise _UnusualJson
    return Number(text)


def _check_levels(value: Any, levels: int, left: int) -> None:
    """Raise _UnusualJson if a value has more levels, or if a text and the keys above it have more characters."""
    if isinstance(value, dict | list):
        if not levels:
            raise _UnusualJson
        for key, one in value.items() if isinstance(value, dict) else (("", one) for one in value):
            _check_levels(one, levels - 1, left - len(key) - 1)
    elif left < 0 or (isinstance(value, str) and len(value) > left):
        raise _UnusualJson


def _by_row(texts: pa.Array, convert: Callable[[str], str]) -> pa.Array:
    return pa.array([NULL if text is None else convert(text) for text in texts.to_pylist()], pa.string())


def _all_usual(texts: pa.Array, kind: ValueKind) -> pa.Array:
    """Convert texts that match the pattern of their kind; NULL stays NULL."""
    if kind in {ValueKind.INTEGER, ValueKind.NUMBER}:
        return texts
    if kind is ValueKind.BOOLEAN:
        return pc.if_else(pc.equal(texts, "t"), "true", "false")
    if kind in {ValueKind.TIMESTAMP, ValueKind.MOMENT}:
        texts = pc.replace_substring(pc.replace_substring(texts, " ", "T"), "+00", "Z")
    else:
        for character, escape in _ESCAPES.items():
            texts = pc.replace_substring(texts, character, escape)
    return pc.binary_join_element_wise('"', texts, '"', "")


def _array_json(text: str, kind: ValueKind) -> str:
    try:
        elements = parse_array(text)
    except pa.ArrowInvalid:
        return str(encode_basestring(text))
    convert = _TO_JSON[kind]
    return "[" + ",".join(NULL if element is None else convert(element) for element in elements) + "]"


def _boolean_json(text: str) -> str:
    return {"t": "true", "f": "false"}.get(text) or str(encode_basestring(text))


def _number_json(text: str) -> str:
    return text if _NUMBER.fullmatch(text) else str(encode_basestring(text))


def _timestamp_json(text: str) -> str:
    return f'"{text[:10]}T{text[11:]}"' if _STAMP.fullmatch(text) else str(encode_basestring(text))


def _moment_json(text: str) -> str:
    plain = text.removesuffix("+00")
    is_usual = plain != text and _STAMP.fullmatch(plain)
    return f'"{plain[:10]}T{plain[11:]}Z"' if is_usual else str(encode_basestring(text))


def _bytes_json(text: str) -> str:
    try:
        return f'"{base64.b64encode(bytes.fromhex(text.removeprefix(_HEX))).decode()}"'
    except ValueError:
        return str(encode_basestring(text))


def _object_json(text: str) -> str:
    try:
        value = _usual_json(text)
    except _UnusualJson:
        return f"{RAW_START}{encode_basestring(text)}}}"
    if isinstance(value, dict) and value.keys() not in ({WRAPPER}, {RAW}):
        return dump_json(value)
    return f'{{"{WRAPPER}": {dump_json(value)}}}'


def _point_json(text: str) -> str:
    found = _POINT.fullmatch(text)
    return str(encode_basestring(text)) if found is None else f'"POINT ({found[1]} {found[2]})"'


def _boolean_text(value: Any) -> str:
    return {True: "t", False: "f"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _timestamp_text(value: Any) -> str:
    found = _ISO.fullmatch(str(value))
    return str(value) if found is None else f"{found[1]} {found[2]}{'+00' if found[3] else ''}"


def _bytes_text(value: Any) -> str:
    try:
        return _HEX + base64.b64decode(str(value), validate=True).hex()
    except (binascii.Error, ValueError):
        return str(value)


def _object_text(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {RAW}:
        return str(value[RAW])
    is_wrapped = isinstance(value, dict) and value.keys() == {WRAPPER}
    return dump_json(value[WRAPPER] if is_wrapped else value)


def _point_text(value: Any) -> str:
    found = _WKT.fullmatch(str(value))
    return str(value) if found is None else f"({found[1]},{found[2]})"


_HEX: Final = "\\x"
_NUMBER: Final = re.compile(_JSON_NUMBER)
_STAMP: Final = re.compile(_TIMESTAMP)
_TO_JSON: Final[Mapping[ValueKind, Callable[[str], str]]] = {
    ValueKind.BOOLEAN: _boolean_json,
    ValueKind.INTEGER: _number_json,
    ValueKind.NUMBER: _number_json,
    ValueKind.DATE: encode_basestring,
    ValueKind.TIMESTAMP: _timestamp_json,
    ValueKind.MOMENT: _moment_json,
    ValueKind.BYTES: _bytes_json,
    ValueKind.JSON: _object_json,
    ValueKind.POINT: _point_json,
    ValueKind.WORDS: encode_basestring,
    ValueKind.EXACT: encode_basestring,
}
_TO_TEXT: Final[Mapping[ValueKind, Callable[[Any], str]]] = {
    ValueKind.BOOLEAN: _boolean_text,
    ValueKind.TIMESTAMP: _timestamp_text,
    ValueKind.MOMENT: _timestamp_text,
    ValueKind.BYTES: _bytes_text,
    ValueKind.JSON: _object_text,
    ValueKind.POINT: _point_text,
}
"""Kind → conversion of a value; the text of a value of any other kind is the value itself."""
