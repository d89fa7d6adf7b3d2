"""Division of log rows into parts by key, so that the parts of a run can be compacted independently of each other.

A part has all rows of its keys: a hash of relation and key chooses the part. Moves with partial images are a rare
exception. A move is an update that changes the key. If its image is partial, the unsent columns are in a row of the old
key. If that row is in the same range, the old and the new key belong to the same part. Otherwise the row is read from
an older run.

Spark moves the rows of a part between its workers as Arrow IPC streams in a binary column, so no row reaches the JVM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Final
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.compacted_table import Run
from cdc.log.disk_format import LogFile
from cdc.log.reader import read_file
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compact_rows import partial_moves

_MOVE_SCHEMA: Final = pa.schema([LOG_SCHEMA.field("relation"), ("key", pa.string()), ("old_key", pa.string())])
_MOVE_COLUMNS: Final = ["relation", "key", "old_key", "partial"]
_LZ4: Final = pa.ipc.IpcWriteOptions(compression="lz4")


def read_partial_moves(files: Iterable[LogFile], after: Position, upto: Position) -> pa.Table:
    """Return the updates in (after, upto] that change the key and have a partial image.

    The columns are relation, key and old_key. The values of a key are joined to one text.
    """
    # statistics rule out most files, two narrow columns most of the others
    with_moves = (
        file for file in files if file.partial and _has_moves(read_file(file, after, upto, ["partial", "old_key"]))
    )
    found = (moves_as_texts(read_file(file, after, upto, _MOVE_COLUMNS)) for file in with_moves)
    return pa.concat_tables([_MOVE_SCHEMA.empty_table(), *found])


def moves_as_texts(rows: pa.Table) -> pa.Table:
    """Return the updates in `rows` that change the key and have a partial image.

    The old and the new key are one text each, in the form that `read_partial_moves` returns.
    """
    moves = partial_moves(rows)
    return pa.table(
        [moves["relation"], pc.binary_join(moves["key"], "\0"), pc.binary_join(moves["old_key"], "\0")],
        schema=_MOVE_SCHEMA,
    )


def _has_moves(rows: pa.Table) -> bool:
    return bool(pc.any(pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))).as_py())


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


def part_of_key(relation: int, text: str, parts: int) -> int:
    """Return the number of the part that contains a key, by a hash of relation and key.

    text: the key as one text. If an update with a partial image changed the key, `parts_of_moved_keys` returns its
    part instead.
    """
    return crc32(text.encode(), relation & 0xFFFFFFFF) % parts


def read_base_rows(moves: pa.Table, runs: Sequence[Run]) -> pa.Table:
    """Read from the runs the rows of the old keys of `moves`, and all control rows `t` and `g` of their relations."""
    found = [LOG_SCHEMA.empty_table()]
    if not moves.num_rows:
        return found[0]
    relations, old_keys = moves["relation"].unique(), moves["old_key"].unique()
    bounds = pc.min_max(relations)
    for run in runs:
        if run.relations[0] <= bounds["max"].as_py() and bounds["min"].as_py() <= run.relations[1]:
            found += [_rows_of_keys(file, relations, old_keys) for file in run.files if not file.schemas_only]
    return pa.concat_tables(found)


def _rows_of_keys(file: LogFile, relations: pa.Array, keys: pa.Array) -> pa.Table:
    narrow = read_file(file, Position(0), file.last, ["relation", "op", "key"])
    is_fence = pc.is_in(narrow["op"], pa.array(["t", "g"]))
    has_key = pc.is_in(pc.binary_join(narrow["key"], "\0"), keys)
    wanted = pc.and_(pc.is_in(narrow["relation"], relations), pc.or_(is_fence, has_key))
    if not pc.any(wanted).as_py():
        return LOG_SCHEMA.empty_table()
    return read_file(file, Position(0), file.last).filter(wanted)


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
