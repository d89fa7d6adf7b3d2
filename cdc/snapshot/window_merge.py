"""Window merge: combines the rows of a chunk with the changes that the stream contains while the chunk is read.

A chunk is read under a snapshot that sees every transaction up to position R. Its rows are inserted at the watermark H,
which is sent after the read. The snapshot may have seen any part of the window (R, H]. At H the state of a row is:

- the state in the stream, if the window contains a full image or a deletion of the key: the chunk's row is dropped;
- the chunk's row overlaid with the sent columns of partial images, if the window contains only partial images. A column
  that no image contains has not changed since R. A column that was sent has the last sent value, whichever version of
  the row the snapshot saw. Dropping the row instead would lose the unsent columns for ever;
- the chunk's row, if the window contains no change of the key.

A key of a key list that has no row in the snapshot becomes a deletion. The deletion applies if the window contains no
change of the key: then there is no row at H either. Any change in the window, even a partial image, replaces the
deletion, because the row was inserted or moved to this key after the snapshot.

So a chunk never replaces a newer state by an older one. A truncate in the window empties the chunk, because the window
contains every later insert. After a schema change in the window the chunk is read again.

Rows of a table without a key cannot be identified. Such a table is read completely in one snapshot and replaced at H: a
truncate, then the snapshot's rows, then a repetition of the window's transactions that the snapshot did not see. A
snapshot sees a transaction entirely or not at all. Subtransactions become visible together with their top-level
transaction, whose xid the stream contains. A prepared transaction stays invisible until COMMIT PREPARED.

The snapshot may see a transaction and miss a transaction that committed earlier. These two transactions changed no
common row, and neither of them truncated the table, because a transaction keeps its locks until it becomes visible. So
unseen transactions may follow seen ones, in log order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.encoded_chunk import EncodedChunk
from cdc.log_row import LOG_SCHEMA, Operation, RowOrder
from cdc.postgres.visibility import Visibility

KEYED_COLUMNS: Final = ("op", "key", "after", "partial")
"""Columns of the stream's rows that `merge_keyed` needs."""
KEYLESS_COLUMNS: Final = tuple(
    name for name in LOG_SCHEMA.names if name not in {"position", "ordinal", "committed_at", "address"}
)
"""Columns of the stream's rows that are kept for a table without a key, so that the rows can be written again."""


def merge_keyed(chunk: pa.Table, window: pa.Table) -> pa.Table | None:
    """Return the chunk's rows merged with the changes of the window, without rows that these changes replace.

    `chunk` contains rows in LOG_SCHEMA with keys and operation `r` or `d`. `window` contains the KEYED_COLUMNS of the
    relation's rows between window opening and watermark, in log order. Returns None after a schema change in the
    window: the chunk must then be read again.
    """
    if has_schema_change(window):
        return None
    if _any(pc.equal(window["op"], Operation.TRUNCATE.value)):
        return chunk.slice(0, 0)
    rows = window.filter(pc.is_valid(window["key"]))
    if not rows.num_rows or not chunk.num_rows:
        return chunk
    keys = _key_texts(rows["key"])
    deleted = pc.equal(rows["op"], Operation.DELETE.value)
    decided = keys.filter(pc.or_(deleted, pc.invert(rows["partial"])))
    own = _key_texts(chunk["key"])
    overruled = pc.is_in(own, decided.combine_chunks())
    gone = pc.equal(chunk["op"], Operation.DELETE.value)
    if _any(gone):
        overruled = pc.or_(overruled, pc.and_(gone, pc.is_in(own, keys.combine_chunks())))
    chunk = chunk.filter(pc.invert(overruled))
    partial = rows.filter(pc.and_(rows["partial"], pc.invert(pc.is_in(keys, decided.combine_chunks()))))
    return _overlay_partial(chunk, partial) if partial.num_rows else chunk


def merge_encoded(chunk: EncodedChunk, window: pa.Table) -> tuple[tuple[int, ...], pa.Table] | None:
    """Return the row groups of a chunk that the window left unchanged, and the merged rows of the other row groups.

    A row group is decoded only if the window contains a change of one of its keys, and its keys only if the window
    contains any change. `window` is as in `merge_keyed`.
    Returns None after a schema change in the window: the chunk must then be read again.
    """
    if has_schema_change(window):
        return None
    if _any(pc.equal(window["op"], Operation.TRUNCATE.value)):
        return (), LOG_SCHEMA.empty_table()
    keys = _key_texts(window["key"].drop_null()).combine_chunks()
    if not len(keys):
        return tuple(range(len(chunk.group_rows))), LOG_SCHEMA.empty_table()
    changed, unchanged = list[int](), list[int]()
    for number, group_keys in enumerate(chunk.group_keys()):
        is_changed = _any(pc.is_in(_key_texts(group_keys), keys))
        (changed if is_changed else unchanged).append(number)
    rows = merge_keyed(chunk.table(changed), window)
    return None if rows is None else (tuple(unchanged), rows)


def unseen_rows(window: pa.Table, visibility: Visibility) -> pa.Table | None:
    """Return the rows of a window whose transactions a snapshot did not see.

    `window` contains the KEYLESS_COLUMNS of the relation's rows between window opening and watermark, in log order.
    Returns None after a schema change in the window: the chunk must then be read again.
    """
    if has_schema_change(window):
        return None
    return window.filter(pa.array(~visibility.sees(window["xid"].to_numpy())))


def rows_at_position(rows: pa.Table, first: RowOrder, address: str | None = None) -> Iterator[pa.RecordBatch]:
    """Yield the rows as batches in LOG_SCHEMA, with the position of `first` and consecutive ordinals.

    `rows` has at least KEYLESS_COLUMNS. `address` is the only sink that receives the rows, or None for all sinks.
    """
    count = rows.num_rows
    replaced: dict[str, Any] = {
        "position": pa.repeat(pa.scalar(first.position, pa.int64()), count),
        "ordinal": pa.arange(first.ordinal, first.ordinal + count),
        "xid": pa.repeat(pa.scalar(first.xid, pa.int64()), count),
        "committed_at": pa.repeat(pa.scalar(first.committed_at, LOG_SCHEMA.field("committed_at").type), count),
        "address": pa.repeat(pa.scalar(address, pa.string()), count),
    }
    columns = [replaced[name] if name in replaced else rows[name] for name in LOG_SCHEMA.names]
    yield from pa.table(columns, schema=LOG_SCHEMA).to_batches()


def _overlay_partial(chunk: pa.Table, partial: pa.Table) -> pa.Table:
    """Return the chunk's rows overlaid with the columns of partial images of the same keys."""
    sent: dict[str, dict[int, str | None]] = {}
    for key, image in zip(_key_texts(partial["key"]).to_pylist(), partial["after"].to_pylist(), strict=True):
        sent.setdefault(key, {}).update(image or ())
    keys = _key_texts(chunk["key"])
    touched = pc.is_in(keys, pa.array(list(sent), pa.string()))
    rows = chunk.filter(touched)
    images = [
        list((dict(image) | sent[key]).items())
        for key, image in zip(_key_texts(rows["key"]).to_pylist(), rows["after"].to_pylist(), strict=True)
    ]
    index = rows.column_names.index("after")
    rows = rows.set_column(index, LOG_SCHEMA.field("after"), pa.array(images, LOG_SCHEMA.field("after").type))
    return pa.concat_tables([chunk.filter(pc.invert(touched)), rows])


def rows_of_relation(
    rows: pa.RecordBatch, relation: int, after: int, columns: Sequence[str] = KEYED_COLUMNS
) -> pa.Table:
    """Return one relation's rows with a position greater than `after`, reduced to the given columns."""
    wanted = pc.and_(pc.equal(rows["relation"], relation), pc.greater(rows["position"], after))
    return pa.Table.from_batches([rows.select(columns).filter(wanted)])


def has_schema_change(window: pa.Table) -> bool:
    """Return True if a row of the window is a new schema version."""
    return _any(pc.equal(window["op"], Operation.SCHEMA.value))


def _key_texts(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return each key as one string; NUL separates the values, because Postgres text cannot contain NUL."""
    return pc.binary_join(keys, "\0")


def _any(flags: pa.ChunkedArray) -> bool:
    return bool(pc.any(flags).as_py())
