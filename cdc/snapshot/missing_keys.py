"""Gone: the rows of the log that say of keys that were asked for that the table has none of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from cdc.change import LOG_SCHEMA, Operation
from cdc.table import TableSchema

_BLANK: Final[dict[str, Any]] = dict.fromkeys(LOG_SCHEMA.names) | {
    "position": 0,
    "ordinal": 0,
    "xid": 0,
    "committed_at": 0,
    "partial": False,
}
"""Its place is given to a row when it is placed."""


def deletion_rows(schema: TableSchema, keys: Sequence[tuple[str, ...]]) -> pa.Table:
    """One `d` row (LOG_SCHEMA) per key, as the stream tells of a row that is deleted: its old image is its key."""
    said = _BLANK | {"relation": schema.relation, "topic": schema.topic, "op": Operation.DELETE.value}
    places = [(column.id, column.key) for column in schema.sent if column.key is not None]
    rows = [said | {"key": list(key), "before": [(column, key[place]) for column, place in places]} for key in keys]
    return pa.Table.from_pylist(rows, LOG_SCHEMA)
