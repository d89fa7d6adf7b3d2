"""Log rows for tests: whole transactions of one or several relations."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from cdc.log.disk_format import CommitInfo, LogIdentity
from cdc.log.writer import SegmentLimits
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.logical_message import message_key
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema

IDENTITY = LogIdentity(system_id="7000", database="shop")
LIMITS = SegmentLimits(size=1 << 28, age=3600.0)


def row(position: int, ordinal: int = 0, **fields: Any) -> dict[str, Any]:
    """One insert into shop.orders, with fields replaced."""
    blank: dict[str, Any] = dict.fromkeys(LOG_SCHEMA.names)
    return (
        blank
        | {
            "position": position,
            "ordinal": ordinal,
            "xid": 1,
            "committed_at": 1_700_000_000_000_000 + position,
            "relation": 16384,
            "topic": "shop.orders",
            "op": Operation.CREATE.value,
            "key": [str(ordinal)],
            "after": [(1, str(ordinal)), (2, None)],
            "partial": False,
        }
        | fields
    )


def message_row(position: int, ordinal: int = 0, prefix: str = "app", **fields: Any) -> dict[str, Any]:
    """A transactional logical message, with fields replaced."""
    key = message_key(prefix, Lsn(position - 1), transactional=True)
    control = {"op": Operation.MESSAGE.value, "relation": None, "topic": None, "after": None, "payload": b"hello"}
    return row(position, ordinal, **(control | {"key": key} | fields))


def table(*rows: dict[str, Any]) -> pa.Table:
    """Rows as the log holds them."""
    return pa.Table.from_pylist(list(rows), LOG_SCHEMA)


def schema_of(relation: int = 16384, *columns: str) -> TableSchema:
    """A schema with an integer key `id` and text columns."""
    names = ("id", *columns)
    return TableSchema(
        relation=relation,
        oid=relation,
        schema="shop",
        name="orders",
        replica_identity=ReplicaIdentity.DEFAULT,
        columns=tuple(
            Column(
                id=i,
                name=name,
                type_oid=23 if i == 1 else 25,
                type_name="integer" if i == 1 else "text",
                key=0 if i == 1 else None,
            )
            for i, name in enumerate(names, start=1)
        ),
    )


def info(last: int) -> CommitInfo:
    """A commit that ends at last."""
    return CommitInfo(last=Position(last), committed_at=1_700_000_000_000_000 + last, timeline=1)
