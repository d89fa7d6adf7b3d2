"""Moves: partial images that came from another key, and what must be at hand to complete them.

They are rare. Such a row's other columns stand under the key that it left: in the same range, so both keys must be
folded together, or in an older run, where they are looked up.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA
from cdc.log.compacted_state import Run
from cdc.log.layout import LogFile
from cdc.log.reader import read_file
from cdc.position import Position
from pipelines.compaction.compact_rows import moved

_MOVE: Final = pa.schema([LOG_SCHEMA.field("relation"), ("key", pa.string()), ("old_key", pa.string())])
_SOUGHT: Final = ["relation", "key", "old_key", "partial"]


def moves_in(files: Iterable[LogFile], after: Position, upto: Position) -> pa.Table:
    """The moves with partial images in (after, upto]: relation, key and old_key, these as one text each."""
    # of most files the statistics, of most others the two narrow columns say that there is none
    having = (file for file in files if file.partial and _any(read_file(file, after, upto, ["partial", "old_key"])))
    found = (_texts(moved(read_file(file, after, upto, _SOUGHT))) for file in having)
    return pa.concat_tables([_MOVE.empty_table(), *found])


def moves_of(rows: pa.Table) -> pa.Table:
    """The same of rows that are at hand."""
    return _texts(moved(rows))


def _any(rows: pa.Table) -> bool:
    return bool(pc.any(pc.and_(rows["partial"], pc.is_valid(rows["old_key"]))).as_py())


def _texts(moves: pa.Table) -> pa.Table:
    return pa.table(
        [moves["relation"], pc.binary_join(moves["key"], "\0"), pc.binary_join(moves["old_key"], "\0")],
        schema=_MOVE,
    )


def together(moves: pa.Table, parts: int) -> dict[tuple[int, str], int]:
    """(relation, key as one text) → part, of every key that moves connect: the same for all that are connected."""
    leads: dict[tuple[int, str], tuple[int, str]] = {}

    def lead(key: tuple[int, str]) -> tuple[int, str]:
        while leads.setdefault(key, key) != key:
            leads[key] = leads[leads[key]]
            key = leads[key]
        return key

    for move in moves.to_pylist():
        new, old = lead((move["relation"], move["key"])), lead((move["relation"], move["old_key"]))
        leads[max(new, old)] = min(new, old)
    return {key: part_of(*lead(key), parts) for key in list(leads)}


def part_of(relation: int, text: str, parts: int) -> int:
    """The part of all rows that a key goes to, if no move connects it with another."""
    return crc32(text.encode(), relation & 0xFFFFFFFF) % parts


def left_behind(moves: pa.Table, runs: Sequence[Run]) -> pa.Table:
    """What runs hold of the keys that were left, and of what ended rows of their relations, as LOG_SCHEMA."""
    found = [LOG_SCHEMA.empty_table()]
    if not moves.num_rows:
        return found[0]
    relations, left = moves["relation"].unique(), moves["old_key"].unique()
    bounds = pc.min_max(relations)
    for run in runs:
        if run.relations[0] <= bounds["max"].as_py() and bounds["min"].as_py() <= run.relations[1]:
            found += [_of_keys(file, relations, left) for file in run.files if not file.schemas_only]
    return pa.concat_tables(found)


def _of_keys(file: LogFile, relations: pa.Array, left: pa.Array) -> pa.Table:
    narrow = read_file(file, Position(0), file.last, ["relation", "op", "key"])
    ended = pc.is_in(narrow["op"], pa.array(["t", "g"]))
    asked = pc.is_in(pc.binary_join(narrow["key"], "\0"), left)
    wanted = pc.and_(pc.is_in(narrow["relation"], relations), pc.or_(ended, asked))
    if not pc.any(wanted).as_py():
        return LOG_SCHEMA.empty_table()
    return read_file(file, Position(0), file.last).filter(wanted)
