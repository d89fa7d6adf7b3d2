"""Queries on the log during a copy: keys without a base row, and transactions that snapshots do not see yet.

If a row is updated during a copy, the stream may send its image without unchanged TOAST columns. Such a partial image
needs a base row in the log. A copy in key order reads the row later, unless the update moved the row to a key that the
copy has already passed. A copy in block order may never read the row: an update can move it to a block that was already
read.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow.compute as pc

from cdc.bucket_files import Root
from cdc.log.reader import LogReader, read_file
from cdc.log_row import HEARTBEAT_PREFIX, Operation
from cdc.position import Position
from cdc.postgres.connection import is_standby
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.visibility import oldest_start, open_xids

CLOCK_SLACK: Final = timedelta(minutes=1)
"""Maximum time by which a commit timestamp may be lower than the timestamp of an earlier commit."""
SHORT_TRANSACTION: Final = 2.0
"""Seconds in which most transactions end; the log is searched only for transactions that stay open longer."""
_COLUMNS: Final = ["relation", "key", "old_key", "partial"]


def keys_without_base(
    root: Root, relation: int, after: Position, upto: Position, *, moved: bool
) -> list[tuple[str, ...]]:
    """Return the keys of a relation's partial images in the log range (after, upto], sorted and without duplicates.

    If `moved` is true, return only the new keys of updates that changed a key.
    """
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
    """Follow rows without a base row through changes of their keys, and return their new keys, sorted.

    `keys` contains the keys of these rows at position `after`. The function reads the log range (after, upto], in which
    a row may change its key several times. It leaves out a row that has a complete image later in the range.
    """
    log, bare, found = LogReader(root), set(keys), set[tuple[str, ...]]()
    deleted_key: tuple[str, ...] | None = None
    for file in sorted(log.files(after, upto), key=lambda file: file.last):
        rows = read_file(file, after, upto, [*_COLUMNS, "op", "position", "ordinal"])
        rows = rows.filter(pc.and_(pc.equal(rows["relation"], relation), pc.is_valid(rows["key"])))
        for row in rows.sort_by([("position", "ascending"), ("ordinal", "ascending")]).to_pylist():
            key, old = tuple(row["key"]), tuple(row["old_key"] or ())
            # a key change is a delete of the old key, directly followed by the image under the new key
            moves = row["partial"] and bool(old) and (old in bare or old == deleted_key)
            deleted_key = key if row["op"] == Operation.DELETE and key in bare else None
            if moves:
                bare.add(key)
                found.add(key)
            elif not row["partial"]:
                bare.discard(key)
                found.discard(key)
    return sorted(found)


def unconfirmed_xids(conn: Any, root: Root) -> np.ndarray:
    """Return the distinct xids of transactions in the log that a new snapshot does not see; usually there are none.

    A transaction can be in the stream before snapshots see it, for example while it waits for a synchronous standby.
    It then is one of the open transactions that a snapshot lists, if a later transaction has ended. `conn` is in
    autocommit mode. A standby shows each commit before it decodes it, so on a standby there are none.

    The log is searched for these transactions back to the start of the oldest one, or to the beginning of the epoch if
    the role may not see when they started. Transactions of an earlier epoch do not count: after a promotion that lost
    them, their xids are those of later transactions.
    """
    if is_standby(conn):
        return np.empty(0, np.int64)
    emit_message(conn, HEARTBEAT_PREFIX, "snapshot")  # the transaction that is later than all in the log
    sought = open_xids(conn, SHORT_TRANSACTION)
    since = oldest_start(conn, sought)
    log, found = LogReader(root), set[int]()
    upto = log.durable or Position(0)
    after = Position.of(0, upto.epoch)
    for file in sorted(log.every_file(), key=lambda file: file.last, reverse=True):
        if file.last <= after or found == sought:
            break
        rows = read_file(file, after, upto, ["xid", "committed_at"])
        found.update(sought.intersection(rows["xid"].unique().to_pylist()))
        if since is not None and rows.num_rows and pc.max(rows["committed_at"]).as_py() < since - CLOCK_SLACK:
            break
    return np.array(sorted(found), np.int64)
