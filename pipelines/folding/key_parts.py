"""Division of log rows into parts by key, so that every part of a range can be folded independently of the others.

A part has all rows of its keys: a hash of relation and key chooses the part. Moves with partial images are a rare
exception. A move is an update that changes the key. If its image is partial, the unsent columns are in a row of the old
key. If that row is in the same range, the old and the new key belong to the same part.

Spark moves the rows of a part between its workers as Arrow IPC streams in a binary column, so no row reaches the JVM.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import LOG_SCHEMA

MOVE_SCHEMA: Final = pa.schema([LOG_SCHEMA.field("relation"), ("key", pa.string()), ("old_key", pa.string())])
"""The columns of `moves_as_texts`."""
_LZ4: Final = pa.ipc.IpcWriteOptions(compression="lz4")


def partial_moves(rows: pa.Table) -> pa.Table:
    """Return relation, key and old_key of the partial images that move a row to another key.

    The unsent columns of such an image are in a row of the old key.
    """
    is_move = pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))
    return rows.filter(is_move).select(["relation", "key", "old_key"])


def part_of_key(relation: int, text: str, parts: int) -> int:
    """Return the number of the part that contains a key, by a hash of relation and key.

    text: the key as one text. If an update with a partial image changed the key, `parts_of_moved_keys` returns its
    part instead.
    """
    return crc32(text.encode(), relation & 0xFFFFFFFF) % parts


def moves_as_texts(rows: pa.Table) -> pa.Table:
    """Return the updates in `rows` that change the key and have a partial image.

    The old and the new key are one text each, in the form that `read_partial_moves` returns.
    """
    moves = partial_moves(rows)
    return pa.table(
        [moves["relation"], pc.binary_join(moves["key"], "\0"), pc.binary_join(moves["old_key"], "\0")],
        schema=MOVE_SCHEMA,
    )


def parts_of_moved_keys(moves: pa.Table, parts: int) -> dict[tuple[int, str], int]:
    """Return (relation, key as one text) → part, for every old and new key in `moves`.

    A move, which is an update that changes the key, connects its two keys; connected keys get the same part.
    """
    # union-find: every set of connected keys has its smallest key as representative
    parents: dict[tuple[int, str], tuple[int, str]] = {}

    def representative(key: tuple[int, str]) -> tuple[int, str]:
        while parents.setdefault(key, key) != key:
            parents[key] = parents[parents[key]]
            key = parents[key]
        return key

    for move in moves.to_pylist():
        new = representative((move["relation"], move["key"]))
        old = representative((move["relation"], move["old_key"]))
        parents[max(new, old)] = min(new, old)
    return {key: part_of_key(*representative(key), parts) for key in list(parents)}


def split_by_part(part_of: np.ndarray, parts: int) -> Iterator[tuple[int, pa.Array]]:
    """Yield (part, indexes of its rows) for every part. part_of: the part of each row."""
    numbers = np.argsort(part_of, kind="stable")
    ends = np.cumsum(np.bincount(part_of, minlength=parts)).tolist()
    for part, (start, end) in enumerate(pairwise([0, *ends])):
        yield part, pa.array(numbers[start:end])


def to_ipc(rows: pa.Table) -> bytes:
    """Return the rows as a compressed Arrow IPC stream."""
    written = pa.BufferOutputStream()
    with pa.ipc.new_stream(written, rows.schema, options=_LZ4) as stream:
        stream.write_table(rows)
    return bytes(written.getvalue())


def from_ipc(stream: pa.Buffer | bytes) -> pa.Table:
    """Return the rows of an Arrow IPC stream."""
    return pa.ipc.open_stream(stream).read_all()
