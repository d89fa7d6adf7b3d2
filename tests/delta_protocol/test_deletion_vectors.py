"""Deletion vectors: read as written, and as Delta's PROTOCOL.md shows them; damage is noticed."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import (
    FOLDER,
    DamagedVector,
    Descriptor,
    ReadFile,
    decode,
    encode,
    path_of,
    rows_of,
)

ROW = st.integers(0, 100) | st.integers(0, (1 << 32) - 1)
RANGE = st.tuples(st.integers(0, 1 << 20), st.integers(0, 1 << 12)).map(lambda found: set(range(found[0], sum(found))))
ROWS = st.sets(ROW, max_size=20) | RANGE
PROTOCOL_ROWS = [3, 4, 7, 11, 18, 29]
OLDER_INLINE: Descriptor = {
    "storageType": "i",
    "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L",
    "sizeInBytes": 40,
    "cardinality": 6,
}
"""The inline example of PROTOCOL.md."""
INLINE = OLDER_INLINE | {"pathOrInlineDv": "^Bg9^0rr910000000000iXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L", "sizeInBytes": 44}
"""The same vector with the magic number of the portable form."""


def file_of(path: str, content: bytes) -> ReadFile:
    """Return a function that reads the only file of a table."""

    def read(wanted: str) -> bytes:
        if wanted != path:
            raise FileNotFoundError(wanted)
        return content

    return read


@given(st.lists(ROWS, max_size=5))
def test_vectors_of_one_file_are_read_as_they_were_written(sets: list[set[int]]) -> None:
    path, content, descriptors = encode([BitMap(rows) for rows in sets])

    assert [set(decode(found, file_of(path, content))) for found in descriptors] == sets
    assert [found["cardinality"] for found in descriptors] == [len(rows) for rows in sets]
    assert {path_of(found) for found in descriptors} <= {path}
    assert path.startswith(f"{FOLDER}/deletion_vector_")


@given(ROWS)
def test_the_rows_of_a_vector_ascend(rows: set[int]) -> None:
    found = rows_of(BitMap(rows))
    assert found.dtype == np.uint32
    assert found.tolist() == sorted(rows)


def test_each_file_has_a_name_of_its_own() -> None:
    assert encode([])[0] != encode([])[0]


def test_the_paths_of_the_protocol() -> None:
    name = "deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert path_of({"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"}) == f"ab/{name}"
    assert path_of({"storageType": "u", "pathOrInlineDv": "^-aqEH.-t@S}K{vb[*k^"}) == name
    absolute = f"s3://bucket/table/{name}"
    assert path_of({"storageType": "p", "pathOrInlineDv": absolute}) == absolute
    assert path_of(INLINE) is None


def test_an_inline_vector_needs_no_file_and_one_of_the_older_form_is_refused() -> None:
    assert list(decode(INLINE, file_of("", b""))) == PROTOCOL_ROWS
    with pytest.raises(DamagedVector, match=r"in _delta_log.*unknown format"):
        decode(OLDER_INLINE, file_of("", b""))


def test_a_file_is_laid_out_as_the_protocol_says() -> None:
    _, content, (first, second) = encode([BitMap([1]), BitMap(PROTOCOL_ROWS)])
    assert (content[0], first["offset"]) == (1, 1)
    at = second["offset"]
    (size,) = struct.unpack_from(">I", content, at)
    blob = content[at + 4 : at + 4 + size]

    assert size == second["sizeInBytes"]
    assert struct.unpack_from("<IQI", blob) == (1681511377, 1, 0)
    assert content[at + 4 + size :] == struct.pack(">I", zlib.crc32(blob))


def in_file(blob: bytes, cardinality: int) -> tuple[Descriptor, ReadFile]:
    """Return the descriptor of a vector with these bytes, with its file."""
    path, content, (descriptor,) = encode([BitMap()])
    content = content[:1] + struct.pack(">I", len(blob)) + blob + struct.pack(">I", zlib.crc32(blob))
    return descriptor | {"sizeInBytes": len(blob), "cardinality": cardinality}, file_of(path, content)


def test_a_vector_without_bitmaps_is_empty() -> None:
    assert decode(*in_file(struct.pack("<IQ", 1681511377, 0), 0)) == BitMap()


FOREIGN = {
    "another magic number": struct.pack("<IQI", 1681511376, 1, 0) + BitMap([1]).serialize(),
    "rows above 32 bits": struct.pack("<IQI", 1681511377, 1, 1) + BitMap([1]).serialize(),
    "two bitmaps": struct.pack("<IQI", 1681511377, 2, 0) + BitMap([1]).serialize(),
    "no bitmap": struct.pack("<IQI", 1681511377, 1, 0),
    "no bytes": b"",
}


@pytest.mark.parametrize("blob", FOREIGN.values(), ids=FOREIGN)
def test_a_vector_of_an_unknown_form_is_refused(blob: bytes) -> None:
    with pytest.raises(DamagedVector):
        decode(*in_file(blob, 1))


def check_damage(descriptor: Descriptor, path: str, content: bytes, rows: BitMap) -> bool:
    """Decode a vector of damaged content, which must raise DamagedVector or give its rows; whether it raised."""
    try:
        found = decode(descriptor, file_of(path, content))
    except DamagedVector as exc:
        assert path in str(exc)  # noqa: PT017 - most damages do raise
        return True
    assert found == rows
    return False


@pytest.mark.parametrize("mask", [1, 0x80, 0xFF])
def test_a_changed_byte_is_noticed_or_does_not_matter(mask: int) -> None:
    vectors = [BitMap([1, 70_000]), BitMap(range(5, 500))]
    path, content, descriptors = encode(vectors)
    noticed = [0, 0]
    for at in range(len(content)):
        damaged = content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :]
        for number, (descriptor, rows) in enumerate(zip(descriptors, vectors, strict=True)):
            noticed[number] += check_damage(descriptor, path, damaged, rows)

    # the bytes of the vector, its size and its checksum
    assert noticed == [descriptor["sizeInBytes"] + 8 for descriptor in descriptors]


def test_a_truncated_file_is_noticed_by_the_vectors_that_it_cuts() -> None:
    vectors = [BitMap([1, 70_000]), BitMap(range(5, 500))]
    path, content, descriptors = encode(vectors)
    for size in range(len(content)):
        noticed = [
            check_damage(descriptor, path, content[:size], rows)
            for descriptor, rows in zip(descriptors, vectors, strict=True)
        ]
        assert noticed == [size < descriptors[1]["offset"], True]


@given(st.data())
def test_a_damaged_inline_vector_raises_nothing_else(source: st.DataObject) -> None:
    text = INLINE["pathOrInlineDv"]
    at = source.draw(st.integers(0, len(text) - 1))
    damaged = source.draw(
        st.sampled_from([text[:at], text[:at] + "0" + text[at + 1 :], text[:at] + "~" + text[at:], ""])
    )
    try:
        assert len(decode(INLINE | {"pathOrInlineDv": damaged}, file_of("", b""))) == 6
    except DamagedVector as exc:
        assert "_delta_log" in str(exc)  # noqa: PT017 - a changed row number cannot be noticed


CHANGES: dict[str, Callable[[Descriptor], dict[str, Any]]] = {
    "cardinality": lambda found: {"cardinality": found["cardinality"] + 1},
    "size": lambda found: {"sizeInBytes": found["sizeInBytes"] - 1},
    "offset": lambda found: {"offset": found["offset"] + 1},
    "offset behind the end": lambda _: {"offset": 1 << 40},
    "storage type": lambda _: {"storageType": "x"},
    "path of another file": lambda _: {"pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"},
    "path that is too short": lambda _: {"pathOrInlineDv": "ab"},
    "path that is not encoded": lambda _: {"pathOrInlineDv": "~" * 20},
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_wrong_descriptor_is_noticed(change: Callable[[Descriptor], dict[str, Any]]) -> None:
    path, content, (descriptor, _) = encode([BitMap([1, 2]), BitMap([3])])
    with pytest.raises(DamagedVector, match="deletion vector"):
        decode(descriptor | change(descriptor), file_of(path, content))
