"""Bases: keys of which the log may hold nothing but parts of rows, because a copy passed them by.

A row that changes while its table is copied comes through the stream, in full or without its unchanged TOASTed columns.
Without them it needs its base in the log. A copy in the order of the key brings that later, unless the row moved to a
key that was read already; a copy in the order of blocks may never meet the row, for the update put it elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection

import pyarrow.compute as pc

from cdc.change import Operation
from cdc.log.object_path import Root
from cdc.log.reader import LogReader, read_file
from cdc.position import Position

_COLUMNS = ["relation", "key", "old_key", "partial"]


def keys_without_base(
    root: Root, relation: int, after: Position, upto: Position, *, moved: bool
) -> list[tuple[str, ...]]:
    """Keys of partial images in (after, upto], distinct; with moved only of those that came from another key."""
    log, keys = LogReader(root), set[tuple[str, ...]]()
    for file in log.files(after, upto):
        if not file.partial:  # as most are, which the copy itself has brought
            continue
        rows = read_file(file, after, upto, _COLUMNS)
        wanted = pc.and_(pc.equal(rows["relation"], relation), rows["partial"])
        if moved:
            wanted = pc.and_(wanted, pc.is_valid(rows["old_key"]))
        keys.update(map(tuple, rows["key"].filter(wanted).to_pylist()))
    return sorted(keys)


def moved_keys_without_base(
    root: Root, relation: int, after: Position, upto: Position, keys: Collection[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Keys that rows of `keys` moved to in (after, upto] before their base was there, one move after another."""
    log, bare, found = LogReader(root), set(keys), set[tuple[str, ...]]()
    left: tuple[str, ...] | None = None
    for file in sorted(log.files(after, upto), key=lambda file: file.last):
        rows = read_file(file, after, upto, [*_COLUMNS, "op", "position", "ordinal"])
        rows = rows.filter(pc.and_(pc.equal(rows["relation"], relation), pc.is_valid(rows["key"])))
        for row in rows.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
            key, old = tuple(row["key"]), tuple(row["old_key"] or ())
            # a move is a delete of the old key and, just behind it, the image under the new one
            moves = row["partial"] and bool(old) and (old in bare or old == left)
            left = key if row["op"] == Operation.DELETE and key in bare else None
            if moves:
                bare.add(key)
                found.add(key)
            elif not row["partial"]:
                bare.discard(key)
                found.discard(key)
    return sorted(found)
