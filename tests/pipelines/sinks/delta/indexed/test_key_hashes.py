"""Key hashes: equal for keys that Delta's merge treats as equal, whatever their arrays; different for others."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sinks.delta.indexed.key_hashes import can_hash, hash_keys
from pipelines.types.families import EXACT_BY_OID, numeric_family, numeric_modifier

Column: TypeAlias = "pa.Array | pa.ChunkedArray"
SECRET = bytes(range(16))
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)
NAN_WITH_SIGN = struct.unpack("<d", struct.pack("<Q", 0xFFF8_0000_0000_0001))[0]
TEXTS = st.none() | st.text(max_size=12)


def hashed(*columns: Column) -> dict[int, tuple[int, int]]:
    """Return row → words of its hash, for the rows whose key has no NULL."""
    hashes, rows = hash_keys(columns, SECRET)
    return dict(zip(rows.tolist(), zip(hashes.high.tolist(), hashes.low.tolist(), strict=True), strict=True))


INTEGERS: list[int | None] = [-1, 0, 7, None, 127]
TIMES = pa.array([NOON, datetime(1969, 12, 31, 23, 59, 59, 999_999, UTC), datetime(1, 1, 1, tzinfo=UTC)])
NEAR = pa.array([NOON, datetime(1677, 10, 1, 0, 0, 0, 1, UTC), None], pa.timestamp("us", tz="UTC"))
EQUAL: dict[str, tuple[Column, Column]] = {
    "int32 and int64": (pa.array(INTEGERS, pa.int32()), pa.array(INTEGERS, pa.int64())),
    "int8 and int16": (pa.array(INTEGERS, pa.int8()), pa.array(INTEGERS, pa.int16())),
    "integers and partition values": (pa.array(INTEGERS, pa.int64()), pa.array(["-1", "0", "7", None, "127"])),
    "dates and partition values": (pa.array([date(2026, 1, 2), date(1, 1, 1)]), pa.array(["2026-01-02", "0001-01-01"])),
    "booleans and partition values": (pa.array([True, False, None]), pa.array(["true", "false", None])),
    "zeros": (pa.array([-0.0, 0.0]), pa.array([0.0, -0.0])),
    "zeros of 32 bits": (pa.array([-0.0], pa.float32()), pa.array([0.0], pa.float32())),
    "NaN": (pa.array([float("nan")]), pa.array([NAN_WITH_SIGN])),
    "micro- and nanoseconds": (NEAR, NEAR.cast(pa.timestamp("ns", tz="UTC"))),
    "micro- and milliseconds": (pa.array([NOON], TIMES.type), pa.array([NOON], pa.timestamp("ms", tz="UTC"))),
    "time zones": (TIMES, TIMES.cast(pa.timestamp("us", tz="America/New_York"))),
    "dictionary of texts": (pa.array(["a", None, "a"]).dictionary_encode(), pa.array(["a", None, "a"])),
    "dictionary of integers": (pa.array([5, 6, 5]).dictionary_encode(), pa.array([5, 6, 5])),
    "large text": (pa.array(["a", "ü"]), pa.array(["a", "ü"], pa.large_string())),
    "text views": (
        pa.array(["a", "longer than twelve bytes"]),
        pa.array(["a", "longer than twelve bytes"], pa.string_view()),
    ),
    "large binary": (pa.array([b"\xff", None]), pa.array([b"\xff", None], pa.large_binary())),
    "fixed binary": (pa.array([b"\xff\x00"]), pa.array([b"\xff\x00"], pa.binary(2))),
    "precisions": (pa.array([Decimal("1.50")], pa.decimal128(5, 2)), pa.array([Decimal("1.50")], pa.decimal128(38, 2))),
}


@pytest.mark.parametrize(("first", "second"), EQUAL.values(), ids=EQUAL)
def test_equal_keys_of_different_types_have_equal_hashes(first: Column, second: Column) -> None:
    assert hashed(first) == hashed(second) != {}


DIFFERENT: dict[str, Sequence[Any]] = {
    "integers": [0, -1, 1, 10, 1 << 40],
    "texts": ["", " ", "a", "A", "a ", "ä", "a\u0308", "\0"],
    "bytes": [b"", b"\0", b"\0\0", b"\xff", b"\xff\0", b"\xfe"],
    "floats": [0.0, 1.0, 0.1, 0.1 + 2**-56, 5e-324, float("inf"), float("-inf"), float("nan")],
    "decimals": [Decimal("0.00"), Decimal("0.01"), Decimal("-0.01"), Decimal("1.00")],
    "moments": [NOON, NOON.replace(microsecond=1), NOON.replace(year=1), NOON.replace(year=9999)],
    "days": [date(2026, 1, 2), date(2026, 2, 1), date(1, 1, 1), date(9999, 12, 31)],
}


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT)
def test_different_keys_have_different_hashes(values: Sequence[Any]) -> None:
    assert len(set(hashed(pa.array(values)).values())) == len(values)


@given(st.lists(st.tuples(st.text(max_size=5), st.integers(-300, 300)), unique=True, max_size=20))
def test_different_composite_keys_have_different_hashes(keys: list[tuple[str, int]]) -> None:
    texts, numbers = [text for text, _ in keys], [number for _, number in keys]
    assert len(set(hashed(pa.array(texts, pa.string()), pa.array(numbers, pa.int64())).values())) == len(keys)


def test_the_bounds_between_the_columns_of_a_key_count() -> None:
    found = hashed(pa.array(["ab", "a", "", "1"]), pa.array(["c", "bc", "abc", "1bc"]))
    assert len(set(found.values())) == 4
    assert hashed(pa.array([1, 12]), pa.array([23, 3]))[0] != hashed(pa.array([12]), pa.array([3]))[0]


def test_a_key_with_null_has_no_hash_and_an_empty_text_has_one() -> None:
    first, second = pa.array(["", None, "a", "b"]), pa.array([1, 2, None, 4])
    assert list(hashed(first)) == [0, 2, 3]
    assert list(hashed(first, second)) == list(hashed(second, first)) == [0, 3]


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.binary(), pa.float64(), pa.null(), pa.date32()])
def test_a_column_of_nulls_and_one_without_rows_have_no_hashes(kind: pa.DataType) -> None:
    assert hashed(pa.nulls(3, kind)) == hashed(pa.array([1, 2, 3]), pa.nulls(3, kind)) == {}
    assert hashed(pa.nulls(0, kind)) == hashed(pa.chunked_array([], kind)) == {}


LAYOUTS: dict[str, Callable[[pa.Array], Column]] = {
    "chunks": lambda array: pa.chunked_array([array[:1], array[1:1], array[1:]]),
    "a slice": lambda array: pa.concat_arrays([array[:1], array, array[:1]])[1:-1],
    "slices in chunks": lambda array: (
        pa.chunked_array([array[:2].slice(1), array[2:]]) if len(array) > 2 else array[1:]
    ),
    "a dictionary": lambda array: array.dictionary_encode(),
    "dictionaries in chunks": lambda array: pa.chunked_array([array[:1], array[1:]]).dictionary_encode(),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(st.lists(st.tuples(TEXTS, st.none() | st.binary(max_size=5)), min_size=1, max_size=8))
def test_the_layout_of_the_arrays_does_not_count(
    layout: Callable[[pa.Array], Column], keys: list[tuple[str | None, bytes | None]]
) -> None:
    columns = [pa.array([key[0] for key in keys], pa.string()), pa.array([key[1] for key in keys], pa.binary())]
    plain, other = hashed(*columns), hashed(*(layout(column) for column in columns))
    skipped = len(keys) - len(layout(columns[0]))

    assert other == {row - skipped: words for row, words in plain.items() if row >= skipped}


def test_both_words_differ_between_keys() -> None:
    hashes, _ = hash_keys([pa.array(np.arange(5_000))], SECRET)
    assert len(np.unique(hashes.high)) == len(np.unique(hashes.low)) == 5_000
    assert not (hashes.high == hashes.low).any()


TEXT_OF = {16: "t", 700: "0.1", 701: "0.1", 1082: "2026-01-02", 1114: "2026-01-02 12:00:00", 17: r"\xff"}
"""Type OID → the text of a value; that of all other types is a number."""


@pytest.mark.parametrize("oid", EXACT_BY_OID)
def test_every_type_of_a_key_column_can_be_hashed(oid: int) -> None:
    family, text = EXACT_BY_OID[oid], TEXT_OF.get(oid, "2026-01-02 12:00:00+00" if oid == 1184 else "7")
    assert can_hash(family.arrow)
    assert len(hashed(family.convert(pa.array([text, None])))) == 1


def test_a_decimal_key_can_be_hashed() -> None:
    family = numeric_family(numeric_modifier(38, 10))
    assert family is not None
    assert can_hash(family.arrow)
    assert len(hashed(family.convert(pa.array(["-1.5", None])))) == 1


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.struct([("a", pa.int64())]), pa.map_(pa.string(), pa.int64())]
)
def test_a_nested_type_cannot_be_hashed(kind: pa.DataType) -> None:
    assert not can_hash(kind)


def test_keys_that_collide_under_a_function_without_a_secret_have_different_hashes() -> None:
    first, second = (
        bytes.fromhex(key) for key in ("11223344556677880102030405060708", "4636c668556677888102030405060708")
    )
    assert len(set(hashed(pa.array([first, second])).values())) == 2


def test_another_secret_gives_other_hashes() -> None:
    keys = pa.array(["a", "b"])
    one, other = (hash_keys([keys], secret)[0] for secret in (SECRET, bytes(16)))
    assert not set(one.high.tolist()) & set(other.high.tolist())
    assert not set(one.low.tolist()) & set(other.low.tolist())


def siphash(secret: bytes, words: list[int]) -> tuple[int, int]:
    """Return SipHash-2-4 of some words, with a result of 128 bits, in plain Python."""
    mask, (first, second) = (1 << 64) - 1, (int.from_bytes(secret[at : at + 8], "little") for at in (0, 8))
    v = [first ^ 0x736F6D6570736575, second ^ 0x646F72616E646F6D ^ 0xEE, first ^ 0x6C7967656E657261]
    v.append(second ^ 0x7465646279746573)

    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> (64 - bits)) & mask

    def rounds(count: int) -> None:
        for _ in range(count):
            v[0], v[2] = (v[0] + v[1]) & mask, (v[2] + v[3]) & mask
            v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2], v[0] = (v[2] + v[1]) & mask, (v[0] + v[3]) & mask
            v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    for word in words:
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    high = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return high, v[0] ^ v[1] ^ v[2] ^ v[3]


@given(st.lists(st.tuples(st.binary(max_size=20), st.binary(max_size=9)), min_size=1, max_size=4))
def test_the_compiled_function_is_siphash_over_lengths_and_texts(rows: list[tuple[bytes, bytes]]) -> None:
    hashes, _ = hash_keys([pa.array(column, pa.binary()) for column in zip(*rows, strict=True)], SECRET)
    for number, row in enumerate(rows):
        words: list[int] = []
        for text in row:
            padded = text + bytes(-len(text) % 8)
            words += [len(text), *(int.from_bytes(padded[at : at + 8], "little") for at in range(0, len(padded), 8))]
        assert (int(hashes.high[number]), int(hashes.low[number])) == siphash(SECRET, words)
