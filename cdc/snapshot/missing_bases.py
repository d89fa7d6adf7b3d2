"""Missing base rows: keys for which the log may contain only partial images, because a copy missed the row.

A row that changes during a copy arrives through the stream, in full or without its unchanged TOASTed columns. A partial
image needs a base row in the log. A copy in key order delivers it later, unless the row moved to a key that was already
read. A copy in block order may never read the row, because the update moved it to another block.
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
    """Distinct keys of partial images in (after, upto]; moved: only images of rows that changed their key."""
    log, keys = LogReader(root), set[tuple[str, ...]]()
    for file in log.files(after, upto):
        if not file.partial:  # most files have none
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
    """Keys to which rows of `keys` moved in (after, upto] before their base row arrived, over any number of moves."""
    log, bare, found = LogReader(root), set(keys), set[tuple[str, ...]]()
    left: tuple[str, ...] | None = None
    for file in sorted(log.files(after, upto), key=lambda file: file.last):
        rows = read_file(file, after, upto, [*_COLUMNS, "op", "position", "ordinal"])
        rows = rows.filter(pc.and_(pc.equal(rows["relation"], relation), pc.is_valid(rows["key"])))
        for row in rows.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
            key, old = tuple(row["key"]), tuple(row["old_key"] or ())
            # a key change is a delete of the old key, directly followed by the image under the new key
            moves = row["partial"] and bool(old) and (old in bare or old == left)
            left = key if row["op"] == Operation.DELETE and key in bare else None
            if moves:
                bare.add(key)
                found.add(key)
            elif not row["partial"]:
                bare.discard(key)
                found.discard(key)
    return sorted(found)
