"""Folded rows by hand: what the fold hands to a sink, for one small table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from cdc.log_row import LOG_SCHEMA
from cdc.table import Column, ReplicaIdentity, TableSchema
from pipelines.sinks.contract import TableBatch

FOLDED = pa.schema(
    [
        LOG_SCHEMA.field("relation"),
        pa.field("op", pa.string()),
        LOG_SCHEMA.field("key"),
        pa.field("position", pa.int64()),
        pa.field("ordinal", pa.int64()),
        pa.field("committed_at", pa.timestamp("us", tz="UTC")),
        LOG_SCHEMA.field("after"),
        pa.field("complete", pa.bool_()),
        pa.field("base", LOG_SCHEMA.field("key").type),
        LOG_SCHEMA.field("payload"),
    ]
)


def with_one_delta_writer(fixture: str, *others: str) -> pytest.MarkDecorator:
    """Have a test show by the indexed writer alone what no writer decides; the slow run has them all.

    fixture: the one whose parameter is the writer; others: parameters of it that are no Delta writers.
    """
    slow = [pytest.param(writer, marks=pytest.mark.slow) for writer in ("copy-on-write", "spark")]
    return pytest.mark.parametrize(fixture, ["indexed", *slow, *others], indirect=True)


def column(id_: int, name: str, type_name: str = "text", *, oid: int = 25, key: int | None = None, **more) -> Column:
    return Column(id=id_, name=name, type_oid=oid, type_name=type_name, key=key, **more)


ID = column(1, "id", "bigint", oid=20, key=0)
ITEM = column(2, "item")
PRICE = column(3, "price", "numeric", oid=1700, typmod=(10 << 16 | 2) + 4)
ORDERS = TableSchema(
    relation=16384,
    oid=16384,
    schema="shop",
    name="orders",
    replica_identity=ReplicaIdentity.DEFAULT,
    columns=(ID, ITEM, PRICE),
)


@dataclass(frozen=True)
class Row:
    """One folded row; `after` by column id, None for a delete."""

    key: tuple[str, ...]
    position: int
    after: Mapping[int, str | None] | None
    ordinal: int = 0
    base: tuple[str, ...] | None = None
    complete: bool = True


def put(id_: int, item: str | None, position: int, price: str = "1.00", **more) -> Row:
    return Row((str(id_),), position, {1: str(id_), 2: item, 3: price}, **more)


def gone(id_: int, position: int, **more) -> Row:
    return Row((str(id_),), position, None, **more)


def part(id_: int, position: int, after: Mapping[int, str | None], **more) -> Row:
    return Row((str(id_),), position, {1: str(id_), **after}, complete=False, **more)


def folded(rows: list[Row], relation: int = ORDERS.relation) -> pa.Table:
    columns: dict[str, list[Any]] = {
        "relation": [relation] * len(rows),
        "op": ["d" if row.after is None else "u" for row in rows],
        "key": [list(row.key) for row in rows],
        "position": [row.position for row in rows],
        "ordinal": [row.ordinal for row in rows],
        "committed_at": [0] * len(rows),
        "after": [None if row.after is None else list(row.after.items()) for row in rows],
        "complete": [row.complete for row in rows],
        "base": [None if row.base is None else list(row.base) for row in rows],
        "payload": [None] * len(rows),
    }
    return pa.table(
        {name: pa.array(values, FOLDED.field(name).type) for name, values in columns.items()}, schema=FOLDED
    )


def batch(rows: list[Row] | None, after: int, upto: int, schema: TableSchema = ORDERS, **control) -> TableBatch:
    images = None if rows is None else folded(rows, schema.relation)
    return TableBatch(schema=schema, rows=images, frame=None, after=after, upto=upto, **control)
