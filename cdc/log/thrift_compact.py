"""Reader and writer of Thrift's compact protocol, in which a Parquet file describes its content.

A struct becomes a dictionary from field ids to typed values, so a footer can be changed without knowledge of the fields
that stay as they are. Writing an unchanged value gives the bytes that were read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

_TRUE: Final = 1
_FALSE: Final = 2
_BYTE: Final = 3
_INTEGERS: Final = frozenset({4, 5, 6})
"""Types of the integers of 16, 32 and 64 bits, which are written alike."""
_DOUBLE: Final = 7
_DOUBLE_BYTES: Final = 8
_BINARY: Final = 8
_LISTS: Final = frozenset({9, 10})
"""Types of a list and of a set, which are written alike."""
_STRUCT: Final = 12
_LONG_LIST: Final = 15
"""Size in the header of a list from which the size follows in a field of its own; also the largest step of a field id.
"""
_BITS: Final = 7
"""Number of bits of an integer in each of its bytes."""
_LOW_BITS: Final = 0x7F
_CONTINUES: Final = 0x80
"""Bit of a byte that another byte of the integer follows."""


@dataclass(slots=True)
class Field:
    """A value with its type in the protocol."""

    kind: int
    value: Any
    """An integer, a boolean, bytes, a `ThriftList`, or a `Struct`; the bytes of a double stay as they are."""


@dataclass(slots=True)
class ThriftList:
    """A list whose elements have one type."""

    kind: int
    values: list[Any]


Struct = dict[int, Field]
"""Fields of a struct by field id, in the order of the bytes."""


def decode_struct(content: bytes) -> Struct:
    """Return the struct that begins the content. Raises ValueError if the content is not a struct."""
    reader = _Reader(content)
    try:
        return reader.struct()
    except IndexError:
        raise ValueError("the struct ends before its last field") from None


def encode_struct(struct: Struct) -> bytes:
    """Return the bytes of a struct."""
    out = bytearray()
    _write_struct(out, struct)
    return bytes(out)


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self._at = content, 0

    def struct(self) -> Struct:
        fields: Struct = {}
        number = 0
        while header := self._byte():
            kind, step = header & 15, header >> 4
            number = number + step if step else self._integer()
            fields[number] = Field(kind, kind == _TRUE if kind in {_TRUE, _FALSE} else self._value(kind))
        return fields

    def _value(self, kind: int) -> Any:
        if kind in _INTEGERS:
            return self._integer()
        if kind == _BINARY:
            return self._take(self._unsigned())
        if kind == _STRUCT:
            return self.struct()
        if kind in _LISTS:
            return self._list()
        if kind in {_BYTE, _TRUE, _FALSE}:  # a boolean in a list is a byte
            return self._byte()
        if kind == _DOUBLE:
            return self._take(_DOUBLE_BYTES)
        raise _unknown_type(kind)

    def _list(self) -> ThriftList:
        header = self._byte()
        kind, size = header & 15, header >> 4
        count = self._unsigned() if size == _LONG_LIST else size
        return ThriftList(kind, [self._value(kind) for _ in range(count)])

    def _byte(self) -> int:
        value = self._content[self._at]
        self._at += 1
        return value

    def _take(self, count: int) -> bytes:
        value = self._content[self._at : self._at + count]
        if len(value) < count:
            raise IndexError
        self._at += count
        return value

    def _unsigned(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & _CONTINUES:
            value |= (byte & _LOW_BITS) << shift
            shift += _BITS
        return value | byte << shift

    def _integer(self) -> int:
        value = self._unsigned()
        return (value >> 1) ^ -(value & 1)


def _write_struct(out: bytearray, struct: Struct) -> None:
    before = 0
    for number, field in struct.items():
        kind = field.kind
        if kind in {_TRUE, _FALSE}:
            kind = _TRUE if field.value else _FALSE
        if 0 < number - before <= _LONG_LIST:
            out.append((number - before) << 4 | kind)
        else:
            out.append(kind)
            _write_integer(out, number)
        if kind not in {_TRUE, _FALSE}:
            _write_value(out, kind, field.value)
        before = number
    out.append(0)


def _write_value(out: bytearray, kind: int, value: Any) -> None:
    if kind in _INTEGERS:
        _write_integer(out, value)
    elif kind == _BINARY:
        _write_unsigned(out, len(value))
        out += value
    elif kind == _STRUCT:
        _write_struct(out, value)
    elif kind in _LISTS:
        _write_list(out, value)
    elif kind in {_BYTE, _TRUE, _FALSE}:
        out.append(value)
    elif kind == _DOUBLE:
        out += value
    else:
        raise _unknown_type(kind)


def _write_list(out: bytearray, elements: ThriftList) -> None:
    count = len(elements.values)
    out.append(min(count, _LONG_LIST) << 4 | elements.kind)
    if count >= _LONG_LIST:
        _write_unsigned(out, count)
    for value in elements.values:
        _write_value(out, elements.kind, value)


def _write_unsigned(out: bytearray, value: int) -> None:
    while value > _LOW_BITS:
        out.append(value & _LOW_BITS | _CONTINUES)
        value >>= _BITS
    out.append(value)


def _write_integer(out: bytearray, value: int) -> None:
    _write_unsigned(out, value << 1 if value >= 0 else (-value << 1) - 1)


def _unknown_type(kind: int) -> ValueError:
    return ValueError(f"a value has type {kind}, which no Parquet footer contains")
