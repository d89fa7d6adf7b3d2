"""Deletion vectors: encodes and decodes the sets of deleted rows of data files, in the format of the Delta protocol.

A vector is a set of row numbers of one data file. It is serialised as a `RoaringBitmapArray` ("Deletion Vector Format"
in Delta's PROTOCOL.md). It begins with a magic number and the 64-bit number of its bitmaps. Each bitmap follows as a
32-bit key and a 32-bit Roaring bitmap in the portable format.

A file of vectors begins with one byte for the version. Each vector has its size before it and its CRC-32 after it.
Size, vector and CRC-32 together have the form of a blob `deletion-vector-v1` of a Puffin file.

The protocol also allows a vector inside its descriptor. Such vectors are read but never written, because VACUUM of
Spark (Delta 4.4.0) fails in a table that has one.
"""

from __future__ import annotations

import base64
import struct
import uuid
import zlib
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final

import numpy as np
from pyroaring import BitMap

Descriptor = dict[str, Any]
"""The field `deletionVector` of an action in `_delta_log`, with the field names of the Delta protocol."""
ReadFile = Callable[[str], bytes]
"""A function that reads a file by its path in the target's directory; raises FileNotFoundError."""

FOLDER: Final = "_vectors"
"""Folder of the deletion vector files, in the table's directory. No other client writes files there.

A full VACUUM of delta-rs spares folders whose names begin with an underscore. In any other folder it would delete
deletion vectors that are in use.
"""
_MAGIC: Final = 1681511377
_VERSION: Final = b"\x01"
_ROWS: Final = 1 << 32
"""Number of rows that one 32-bit bitmap can represent; every data file of a target has fewer rows."""
_B85: Final = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz!#$%&()*+-;<=>?@^_`{|}~"
_Z85: Final = b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"
_UUID_TEXT: Final = 20
"""Number of characters of a UUID in Z85, the encoding that descriptors use."""


class DamagedVector(Exception):
    """Raised for a deletion vector that is missing, damaged or of an unknown form."""


def encode(vectors: Sequence[BitMap]) -> tuple[str, bytes, list[Descriptor]]:
    """Encode vectors for one new file; return its path, its content and one descriptor per vector."""
    name = uuid.uuid4()
    content, descriptors = bytearray(_VERSION), list[Descriptor]()
    for vector in vectors:
        blob = struct.pack("<IQI", _MAGIC, 1, 0) + vector.serialize()
        descriptors.append(
            {
                "storageType": "u",
                "pathOrInlineDv": FOLDER + base64.b85encode(name.bytes).translate(bytes.maketrans(_B85, _Z85)).decode(),
                "offset": len(content),
                "sizeInBytes": len(blob),
                "cardinality": len(vector),
            }
        )
        content += struct.pack(">I", len(blob)) + blob + struct.pack(">I", zlib.crc32(blob))
    return f"{FOLDER}/{_path(name)}", bytes(content), descriptors


def decode(descriptor: Descriptor, read: ReadFile) -> BitMap:
    """Return the vector that a descriptor names; raises DamagedVector."""
    try:
        found = _bitmap(_blob(descriptor, read))
    except (OSError, ValueError, IndexError, struct.error) as exc:
        raise DamagedVector(f"deletion vector {_name_of(descriptor)!r}: {exc}") from exc
    if len(found) != descriptor["cardinality"]:
        raise DamagedVector(
            f"deletion vector {_name_of(descriptor)!r} has {len(found)} rows, expected {descriptor['cardinality']}"
        )
    return found


def path_of(descriptor: Descriptor) -> str | None:
    """Return the path of the file that contains a vector; None if the descriptor itself contains the vector."""
    return _path_in(str(descriptor["storageType"]), str(descriptor["pathOrInlineDv"]))


@lru_cache(maxsize=1024)  # the vectors of one commit are in one file
def _path_in(storage_type: str, text: str) -> str | None:
    match storage_type:
        case "u":
            prefix, encoded = text[:-_UUID_TEXT], text[-_UUID_TEXT:]
            name = uuid.UUID(bytes=base64.b85decode(encoded.encode().translate(bytes.maketrans(_Z85, _B85))))
            return f"{prefix}/{_path(name)}" if prefix else _path(name)
        case "p":
            return text
        case _:
            return None


def rows_of(vector: BitMap) -> np.ndarray:
    """Return the row numbers of a vector, ascending."""
    return np.frombuffer(vector.to_array(), np.uint32)


def _name_of(descriptor: Descriptor) -> str:
    """Return the name of a vector for an error message."""
    try:
        return path_of(descriptor) or "in _delta_log"
    except ValueError:
        return str(descriptor["pathOrInlineDv"])


def _path(name: uuid.UUID) -> str:
    return f"deletion_vector_{name}.bin"


def _blob(descriptor: Descriptor, read: ReadFile) -> bytes:
    path = path_of(descriptor)
    if path is None:
        if descriptor["storageType"] != "i":
            raise ValueError(f"unknown storage type {descriptor['storageType']!r}")
        return base64.b85decode(str(descriptor["pathOrInlineDv"]).encode().translate(bytes.maketrans(_Z85, _B85)))
    content, begin, size = read(path), int(descriptor.get("offset") or 1), int(descriptor["sizeInBytes"])
    blob = content[begin + 4 : begin + 4 + size]
    if struct.unpack_from(">I", content, begin)[0] != size:
        raise ValueError("the size of the vector differs from the size in its descriptor")
    if zlib.crc32(blob) != struct.unpack_from(">I", content, begin + 4 + size)[0]:
        raise ValueError("wrong checksum")
    return blob


def _bitmap(blob: bytes) -> BitMap:
    magic, count = struct.unpack_from("<IQ", blob)
    if magic != _MAGIC:
        raise ValueError("unknown format")
    if count == 0:
        return BitMap()
    if count != 1 or struct.unpack_from("<I", blob, 12)[0] != 0:
        raise ValueError(f"row numbers above {_ROWS}")
    return BitMap.deserialize(blob[16:])
