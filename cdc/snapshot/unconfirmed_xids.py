"""Received: transactions that the log holds already and others at the source do not see yet."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.object_path import Root
from cdc.log.reader import LogReader, read_file
from cdc.position import Position
from cdc.postgres.chunk_snapshot import open_transactions

SLACK: Final = timedelta(minutes=1)
"""By how much commit times may go back from one commit to the next."""


def unconfirmed_xids(conn: Any, root: Root) -> np.ndarray:
    """Xids (int64, distinct) of the log that a snapshot of now does not see; mostly none.

    A transaction that is not seen has not ended for others, so it began no earlier than the oldest open one, and
    committed later than that: only the newest files have to be looked at.
    """
    visibility, oldest = open_transactions(conn)
    log, found, since = LogReader(root), [np.empty(0, np.int64)], pa.scalar(oldest - SLACK)
    upto = log.durable or Position(0)
    for file in sorted(log.every_file(), key=lambda file: file.last, reverse=True):
        rows = read_file(file, Position(0), upto, ["xid", "committed_at"])
        late = rows.filter(pc.greater_equal(rows["committed_at"], since))
        if rows.num_rows and not late.num_rows:
            break
        xids = late["xid"].unique().to_numpy()
        found.append(xids[~visibility.sees(xids)])
    return np.unique(np.concatenate(found))
