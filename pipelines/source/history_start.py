"""Baseline: the state at the horizon as rows that were read, for who wants history from a log whose beginning is gone.

One run of `compacted` is that state already: a row for each key. Several runs have to be folded over one another,
and are dealt out so that a task holds about SHARE_BYTES of Parquet: by relation, for which files are sorted, and
a relation that is larger than that by key as well, where each task reads the relation and keeps its keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, Operation
from cdc.log.layout import LogFile
from cdc.log.ranges import TableSelection
from cdc.log.reader import RowSpan, stream_file
from cdc.position import Position
from pipelines.compaction.compact_rows import compact_rows
from pipelines.compaction.key_partitions import part_of_key, parts_of_moved_keys, read_partial_moves

SHARE_BYTES: Final = 64 << 20
"""Of `compacted`, several times as much in the memory of the task that folds them."""

_IMAGES: Final = pa.array(["c", "r", "u"])
_FENCES: Final = pa.array(["t", "g"])


@dataclass(frozen=True, slots=True, kw_only=True)
class BaselineShare:
    """What one task folds: the rows of some relations, or a part of the keys of one."""

    files: Sequence[LogFile]
    relations: tuple[int, int]
    part: int = 0
    parts: int = 1


def shares(files: Sequence[LogFile], extents: Sequence[RowSpan], limit: int = SHARE_BYTES) -> list[BaselineShare]:
    """The files of several runs dealt out by what lies where in them; each row goes to one share."""
    dealt: list[BaselineShare] = []
    for relations, size in _cut(extents, limit):
        own = TableSelection(relations=relations).narrowed(files)
        parts = max(1, -(-size // limit)) if relations[0] == relations[1] else 1
        dealt += [BaselineShare(files=own, relations=relations, part=part, parts=parts) for part in range(parts)]
    return dealt


def folded(share: BaselineShare, horizon: Position) -> pa.Table:
    """The state of the share's rows at the horizon, as LOG_SCHEMA."""
    only = TableSelection(relations=share.relations)
    moved_parts: dict[tuple[int, str], int] = {}
    if share.parts > 1:
        moved_parts = parts_of_moved_keys(read_partial_moves(share.files, Position(0), horizon), share.parts)
    found = [
        _own(rows, share, moved_parts)
        for file in share.files
        for rows in stream_file(file, Position(0), horizon, LOG_SCHEMA.names, only)
    ]
    return as_read(compact_rows(pa.concat_tables([LOG_SCHEMA.empty_table(), *found])))


def as_read(rows: pa.Table) -> pa.Table:
    """Compacted rows, one of a key, as what a reader would have found there: `r` for each key that is not gone.

    Versions of tables stay, what ended rows goes. The rows of tables without a key stay the changes that they are.
    """
    is_keyed = pc.and_(pc.is_valid(rows["key"]), pc.is_in(rows["op"], _IMAGES))
    is_keyless = pc.and_(pc.is_null(rows["key"]), pc.is_in(rows["op"], pa.array(["c", "d", "r", "u"])))
    stays = pc.or_(pc.or_(is_keyed, is_keyless), pc.equal(rows["op"], Operation.SCHEMA.value))
    op = pc.if_else(is_keyed, Operation.READ.value, rows["op"])
    return rows.set_column(rows.schema.names.index("op"), rows.schema.field("op"), op).filter(stays)


def _cut(extents: Sequence[RowSpan], limit: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Neighbouring relations whose rows come to about limit bytes, and how many they come to."""
    if not extents:
        return
    least, beyond = (np.array([extent[side] for extent in extents], np.int64) for side in (0, 1))
    beyond += 1
    # of rows that are of several relations each is taken to have its part
    density = np.array([extent[2] for extent in extents]) / (beyond - least)
    points = np.unique(np.concatenate([least, beyond]))
    slopes = np.zeros(len(points))
    np.add.at(slopes, np.searchsorted(points, least), density)
    np.subtract.at(slopes, np.searchsorted(points, beyond), density)
    sizes = np.cumsum(slopes)[:-1] * np.diff(points)
    first, held = int(points[0]), 0.0
    for (start, _), size in zip(pairwise(points.tolist()), sizes.tolist(), strict=True):
        if held and held + size > limit:
            yield (first, start - 1), round(held)
            first, held = start, 0.0
        held += size
    yield (first, int(points[-1]) - 1), round(held)


def _own(rows: pa.Table, share: BaselineShare, connected: dict[tuple[int, str], int]) -> pa.Table:
    """The rows that a share's part folds; what ends rows is in each part, what else has no key is in one."""
    if share.parts == 1:
        return rows
    keys = pc.fill_null(pc.binary_join(rows["key"], "\0"), "").to_pylist()
    relation = share.relations[0]
    parts = np.array([connected.get((relation, key), part_of_key(relation, key, share.parts)) for key in keys])
    everywhere = pc.is_in(rows["op"], _FENCES).to_numpy()
    return rows.filter(pa.array((parts == share.part) | everywhere))
