"""Window: what the stream brought while a chunk was read decides which of the chunk's rows go into the log, and how.

A chunk is read under a snapshot that sees everything up to position R; its rows are placed at the watermark H, which
was sent when they were in hand. So the snapshot may have seen any part of the window (R, H], and each row of the chunk
is the row's state at some moment of it. At H its state is:

- what the stream says, if the window holds a full image of the key or its deletion: the chunk's row is dropped;
- the chunk's row with the sent columns of the partial images laid over it, if the window holds only those. A column
  that none of them sent has not changed since R; one that was sent has the value of the last that sent it, whatever
  of them the snapshot saw. Dropping the row instead would lose the columns that were not sent for ever;
- the chunk's row, if the window is silent.

A key that was asked for and has no row in the snapshot comes as a deletion. It stands if the window is silent about the
key: then it has not changed since R, and has no row at H either. Whatever the window says of the key decides instead,
a partial image too: the row came or was moved there after the snapshot.

So a chunk can never put an older state over a newer one. A truncate in the window empties the chunk: whatever was
inserted after it is in the window. A new version of the schema makes the chunk worthless: it is read again.

Rows of a table without a key cannot be told apart, so such a table is read whole, in one snapshot, and begins anew at
H: everything before is cleared, then come the snapshot's rows, then once more the rows of those transactions of the
window that the snapshot did not see. It sees a transaction whole or not at all: sub-transactions end in the moment in
which the topmost one leaves the list of the running, and its xid is the one in that list and in the stream; a prepared
one stays listed under its own until COMMIT PREPARED. The snapshot may see a commit and not an earlier one. Those two
touched no row in common, and neither is a truncate, for locks are held until their holder can be seen: so what was not
seen can follow what was, in the order of the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, Operation, RowOrder
from cdc.postgres.chunk_snapshot import Visibility

KEYED_COLUMNS: Final = ("op", "key", "after", "partial")
"""Columns of the stream's rows that a window needs to settle a chunk."""
KEYLESS_COLUMNS: Final = tuple(
    name for name in LOG_SCHEMA.names if name not in {"position", "ordinal", "committed_at", "address"}
)
"""Columns that it needs where rows may be told once more, at another place."""


def merge_keyed(chunk: pa.Table, window: pa.Table) -> pa.Table | None:
    """The chunk's rows (LOG_SCHEMA, `r` or `d`, with keys) as they are at the end of the window; None: read it again.

    `window` has the KEPT columns of the relation's rows in (R, H], in the order of the log.
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


def unseen_rows(window: pa.Table, visibility: Visibility) -> pa.Table | None:
    """The rows of transactions that a snapshot did not see, in the order of the log; None: read it again.

    `window` has the WHOLE columns of the relation's rows in (R, H].
    """
    if has_schema_change(window):
        return None
    return window.filter(pa.array(~visibility.sees(window["xid"].to_numpy())))


def rows_at_position(rows: pa.Table, first: RowOrder, address: str | None = None) -> Iterator[pa.RecordBatch]:
    """The rows (WHOLE columns or more) at the first one's place, ordinals counting up, for one sink or for all.

    Gives LOG_SCHEMA.
    """
    count = rows.num_rows
    said: dict[str, Any] = {
        "position": pa.repeat(pa.scalar(first.position, pa.int64()), count),
        "ordinal": pa.arange(first.ordinal, first.ordinal + count),
        "xid": pa.repeat(pa.scalar(first.xid, pa.int64()), count),
        "committed_at": pa.repeat(pa.scalar(first.committed_at, LOG_SCHEMA.field("committed_at").type), count),
        "address": pa.repeat(pa.scalar(address, pa.string()), count),
    }
    columns = [said[name] if name in said else rows[name] for name in LOG_SCHEMA.names]
    yield from pa.table(columns, schema=LOG_SCHEMA).to_batches()


def _overlay_partial(chunk: pa.Table, partial: pa.Table) -> pa.Table:
    """Chunk rows with the partial images of their keys laid over them; few, so one by one."""
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
    place = rows.column_names.index("after")
    rows = rows.set_column(place, LOG_SCHEMA.field("after"), pa.array(images, LOG_SCHEMA.field("after").type))
    return pa.concat_tables([chunk.filter(pc.invert(touched)), rows])


def rows_of_relation(
    rows: pa.RecordBatch, relation: int, after: int, columns: Sequence[str] = KEYED_COLUMNS
) -> pa.Table:
    """Those columns of one relation's rows behind a position."""
    wanted = pc.and_(pc.equal(rows["relation"], relation), pc.greater(rows["position"], after))
    return pa.Table.from_batches([rows.select(columns).filter(wanted)])


def has_schema_change(window: pa.Table) -> bool:
    """Whether a new version of the schema is in it, which makes a chunk worthless."""
    return _any(pc.equal(window["op"], Operation.SCHEMA.value))


def _key_texts(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Keys as one text each; Postgres text never holds a NUL."""
    return pc.binary_join(keys, "\0")


def _any(flags: pa.ChunkedArray) -> bool:
    return bool(pc.any(flags).as_py())
