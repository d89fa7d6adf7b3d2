"""Machine instructions on words of several bytes, which numba itself does not offer."""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic


@intrinsic
def load_word(_context: Any, buffer: Any, at: Any) -> Any:
    """Load eight bytes at offset `at` as little-endian uint64; the caller checks the bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.load(_address(context, builder, signature, arguments))
        word.align = 1
        return word

    return types.uint64(buffer, at), generate


@intrinsic
def store_word(_context: Any, buffer: Any, at: Any, word: Any) -> Any:
    """Store a uint64 as eight little-endian bytes at offset `at`; the caller checks the bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = builder.store(arguments[2], _address(context, builder, signature, arguments))
        stored.align = 1
        return context.get_dummy_value()

    return types.void(buffer, at, word), generate


def _reader_of(size: int) -> Any:
    """Return a function that reads an unsigned big-endian integer of `size` bytes at an offset, as int64."""

    @intrinsic
    def read(_context: Any, buffer: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            number = builder.load(_address(context, builder, signature, arguments, size))
            number.align = 1
            swapped = builder.bswap(number)
            return swapped if size == _WORD else builder.zext(swapped, ir.IntType(8 * _WORD))

        return types.int64(buffer, at), generate

    return read


_WORD: Final = 8
"""Number of bytes of a word."""
read_2_bytes: Final = _reader_of(2)
read_4_bytes: Final = _reader_of(4)
read_8_bytes: Final = _reader_of(_WORD)
"""A number of 2**63 or more becomes negative."""


def _address(context: Any, builder: Any, signature: Any, arguments: Any, size: int = 8) -> Any:
    """Return the address of the byte at an offset, as that of an integer of `size` bytes."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.bitcast(builder.gep(array.data, [arguments[1]]), ir.IntType(8 * size).as_pointer())


@intrinsic
def lowest_bit(_context: Any, word: Any) -> Any:
    """Return the index of the lowest set bit of a word other than 0."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.uint64(word), generate
