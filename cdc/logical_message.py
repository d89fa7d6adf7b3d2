"""LogicalMessage: the content of an `m` row, and the keys of many such rows at once.

A logical message belongs to no table, so its row has no relation, topic or image. Its `payload` is the content, and its
`key` has three texts: the prefix, `t` for a transactional message or `f`, and the LSN of the message. Logs of format 1
and 2 have rows without a key; nothing records the prefix, the kind and the LSN of these messages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.log_row import Operation
from cdc.lsn import Lsn

MESSAGE_COLUMNS: Final = ("op", "key")
"""Columns of log rows that `message_prefixes` reads."""
_FLAGS: Final = {"t": True, "f": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class LogicalMessage:
    """One logical message of the log, written with `pg_logical_emit_message` at the source.

    Prefix, `transactional` and `lsn` are None for a message that was logged in format 1 or 2.
    """

    prefix: str | None
    """Any text; empty is a prefix like any other."""
    transactional: bool | None
    """True if the message is part of a transaction; False if it was sent at once, whatever its transaction did."""
    lsn: Lsn | None
    """LSN of the message itself.

    The position of a transactional message has the LSN of the commit record; that of any other message is one lower
    than `lsn`.
    """
    content: bytes
    """Content as it is in the WAL; it need not be UTF-8."""

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Self:
        """Return the message of an `m` row, a row of LOG_SCHEMA as `RecordBatch.to_pylist` returns it."""
        content = bytes(row["payload"] or b"")
        if row["key"] is None:
            return cls(prefix=None, transactional=None, lsn=None, content=content)
        prefix, flag, lsn = row["key"]
        return cls(prefix=prefix, transactional=_FLAGS[flag], lsn=Lsn.parse(lsn), content=content)


class MessageKeys(NamedTuple):
    """The keys of many messages as columns; every column is null for a message that was logged in format 1 or 2."""

    prefixes: pa.StringArray
    transactional: pa.BooleanArray
    lsns: pa.UInt64Array


def message_keys(keys: pa.ListArray) -> MessageKeys:
    """Return prefix, kind and LSN of messages. keys: the column `key` of `m` rows"""
    known = pc.if_else(pc.equal(pc.list_value_length(keys), 3), keys, pa.scalar(None, keys.type))
    lsns = pc.list_element(known, 2).to_pylist()
    return MessageKeys(
        prefixes=pc.list_element(known, 0),
        transactional=pc.equal(pc.list_element(known, 1), "t"),
        lsns=pa.array([None if lsn is None else int(Lsn.parse(lsn)) for lsn in lsns], pa.uint64()),
    )


def message_key(prefix: str, lsn: Lsn, *, transactional: bool) -> list[str]:
    """Return the `key` of the log row of a message."""
    return [prefix, "t" if transactional else "f", str(lsn)]


def message_prefixes(rows: pa.RecordBatch | pa.Table) -> pa.StringArray | pa.ChunkedArray:
    """Return one text per row: the prefix of a message; null for other rows and for messages of format 1 and 2.

    `rows` has at least MESSAGE_COLUMNS. The result is a StringArray for a batch, and a ChunkedArray for a table.
    """
    is_message = pc.equal(rows["op"], Operation.MESSAGE.value)
    prefixes = pc.list_element(rows["key"].filter(is_message), 0)
    # a mask over all keys would copy every key of the rows
    numbers = pc.subtract(pc.cumulative_sum(is_message.cast(pa.int64())), 1)
    return prefixes.take(pc.if_else(is_message, numbers, pa.scalar(None, pa.int64())))
