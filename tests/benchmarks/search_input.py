"""Input of the benchmark of search sinks: rows of six columns, as a change log for ours and documents for the peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import CommitInfo
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.position import Position
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import IDENTITY, LIMITS, row, table

COMMIT: Final = 100_000
"""Rows of one commit of the log."""
COMMITTED_AT: Final = 1_700_000_000_000_000
FIRST: Final = 1_000
"""Position of row 0; row n was inserted by a transaction of its own."""
ITEMS: Final = TableSchema(
    relation=16_384,
    oid=16_384,
    schema="shop",
    name="items",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(
        Column(id=1, name="id", type_oid=20, type_name="bigint", key=0),
        Column(id=2, name="name", type_oid=25, type_name="text"),
        Column(id=3, name="price", type_oid=1700, type_name="numeric", typmod=(12 << 16 | 2) + 4),
        Column(id=4, name="made", type_oid=1184, type_name="timestamp with time zone"),
        Column(id=5, name="active", type_oid=16, type_name="boolean"),
        Column(id=6, name="note", type_oid=25, type_name="text"),
    ),
)
WORDS: Final = (
    "amber anchor apple arrow autumn badge basin beacon birch blade bloom bolt branch brick bridge brook candle canyon "
    "cedar chain chalk circle clay cliff cloud clover coal coast copper coral cotton crane creek crown crystal"
)
NOTE_WORDS: Final = 8


def write_log(folder: Path, rows: int) -> Path:
    """Write a log in which transactions of one row each insert so many rows, and return its path."""
    writer, topic = LogWriter.open(folder / "log", IDENTITY, LIMITS), ITEMS.topic
    described = row(
        FIRST - 1, op="s", relation=ITEMS.relation, topic=topic, key=None, after=None, payload=ITEMS.to_json()
    )
    _commit(writer, table(described), FIRST - 1)
    for first in range(0, rows, COMMIT):
        last = min(first + COMMIT, rows)
        _commit(writer, _inserts(first, last), FIRST + last - 1)
    return folder / "log"


def _commit(writer: LogWriter, rows: pa.Table, position: int) -> None:
    writer.commit(writer.stage(rows), CommitInfo(last=Position(position), committed_at=COMMITTED_AT, timeline=1))


def _inserts(first: int, last: int) -> pa.Table:
    """Return the log rows of the numbers from `first` up to, and without, `last`."""
    columns = _texts(first, last)
    count = last - first
    ids = pa.array(np.tile(np.arange(1, len(columns) + 1, dtype=np.int32), count))
    # the entries of one row follow each other
    places = np.arange(count * len(columns)).reshape(len(columns), count).T.ravel()
    items = pa.concat_arrays(columns).take(pa.array(places))
    offsets = pa.array(np.arange(0, len(items) + 1, len(columns), dtype=np.int32))
    values = {
        "position": pa.array(FIRST + np.arange(first, last)),
        "ordinal": pa.array(np.zeros(count, np.int64)),
        "xid": pa.array(np.arange(first, last) + 1),
        "committed_at": pa.repeat(pa.scalar(COMMITTED_AT, pa.timestamp("us", "UTC")), count),
        "relation": pa.array(np.full(count, ITEMS.relation)),
        "topic": pa.repeat(pa.scalar(ITEMS.topic), count),
        "op": pa.repeat(pa.scalar(Operation.CREATE.value), count),
        "key": pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), columns[0]),
        "after": pa.MapArray.from_arrays(offsets, ids, items),
        "partial": pa.array(np.zeros(count, bool)),
    }
    arrays = [values.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
    return pa.table(arrays, names=LOG_SCHEMA.names).cast(LOG_SCHEMA)


def documents(first: int, last: int) -> list[dict[str, Any]]:
    """Return the same rows as documents of Python values, as an application would give them to a client library."""
    ids, names, prices, made, active, notes = (column.to_pylist() for column in _texts(first, last))
    return [
        {
            "id": int(id_),
            "name": name,
            "price": float(price),
            "made": f"{at[:10]}T{at[11:-3]}Z",
            "active": is_active == "t",
            "note": note,
            "_position": FIRST + int(id_),
        }
        for id_, name, price, at, is_active, note in zip(ids, names, prices, made, active, notes, strict=True)
    ]


def _texts(first: int, last: int) -> list[pa.Array]:
    numbers = np.arange(first, last, dtype=np.int64)
    ids = pa.array(numbers).cast(pa.string())
    cents = pa.array(numbers % 100).cast(pa.string())
    seconds = pa.array(1_767_225_600 + numbers).cast(pa.timestamp("s"))
    choice = np.array(WORDS.split())
    words = choice[np.random.default_rng(first).integers(0, len(choice), (NOTE_WORDS, len(numbers)))]
    return [
        ids,
        pc.binary_join_element_wise("item", ids, " "),
        pc.binary_join_element_wise(
            pa.array(numbers // 100 % 100_000).cast(pa.string()), pc.utf8_lpad(cents, 2, padding="0"), "."
        ),
        pc.binary_join_element_wise(pc.strftime(seconds, "%Y-%m-%d %H:%M:%S"), "+00", ""),
        pa.array(np.where(numbers % 3 == 0, "t", "f")),
        pc.binary_join_element_wise(*(pa.array(column) for column in words), " "),
    ]
