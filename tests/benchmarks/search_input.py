"""Input of the benchmark of search sinks: rows of six columns, folded for our sinks and as documents for the peer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import Column, ReplicaIdentity, TableSchema
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import TableBatch

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


def folded_rows(first: int, last: int) -> pa.Table:
    """Return the folded rows of the numbers from `first` up to, and without, `last`."""
    columns = _texts(first, last)
    count = last - first
    ids = pa.array(np.tile(np.arange(1, len(columns) + 1, dtype=np.int32), count))
    # the entries of one row follow each other
    places = np.arange(count * len(columns)).reshape(len(columns), count).T.ravel()
    items = pa.concat_arrays(columns).take(pa.array(places))
    offsets = pa.array(np.arange(0, len(items) + 1, len(columns), dtype=np.int32))
    after = FOLDED_ARROW.field("after").type
    key = pa.ListArray.from_arrays(pa.array(np.arange(count + 1, dtype=np.int32)), columns[0])
    values = {
        "relation": pa.array(np.full(count, ITEMS.relation)),
        "op": pa.repeat("u", count),
        "key": key,
        "position": pa.array(FIRST + np.arange(first, last)),
        "ordinal": pa.array(np.zeros(count, np.int64)),
        "committed_at": pa.repeat(0, count),
        "after": pa.MapArray.from_arrays(offsets, ids, items).cast(after),
        "complete": pa.repeat(True, count),
    }
    return pa.table(
        [
            values[field.name].cast(field.type) if field.name in values else pa.nulls(count, field.type)
            for field in FOLDED_ARROW
        ],
        schema=FOLDED_ARROW,
    )


def batches(rows: int, size: int) -> Iterator[TableBatch]:
    """Yield so many rows in batches of `size` rows."""
    for first in range(0, rows, size):
        last = min(first + size, rows)
        after = FIRST + first - 1 if first else 0
        yield TableBatch(schema=ITEMS, rows=folded_rows(first, last), frame=None, after=after, upto=FIRST + last - 1)


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
