"""Random logs of tables of every kind: each mode of a Delta target, and each key of a rule that changes its rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import schema_of
from tests.pipelines.cold_log import SPREAD, transactions
from tests.pipelines.fold_model import OTHER_SINK, PLAIN, Image, Row, Source, log_row

LARGE, GRADE = 3, 5
UNFIT, RARE = 0.04, 0.3
"""Shares of values that do not fit, and of the model's truncates and copies that happen."""
KEYS: Final = [str(number) for number in range(1, 25)]
MANY: Final = 2**40
"""More than an integer holds."""
DEFAULT: Final = "new"


@dataclass(frozen=True)
class Kind:
    """A kind of table, by what the sink makes of it."""

    name: str
    rule: Mapping[str, Any]
    """Keys of its rule, besides `match`."""
    is_whole: bool = False
    """Whether every change has all columns: the rule needs complete rows."""
    has_key: bool = True
    may_evolve: bool = False
    """Whether its columns may change in the log."""
    is_merged: bool = False
    """Whether tables of this kind have one target."""


def tripled(rows: pa.Table) -> pa.Table:
    """A function of a rule."""
    place = rows.schema.get_field_index("plain")
    return rows.set_column(place, rows.schema.field(place), pc.multiply(rows["plain"], pa.scalar(3, pa.int32())))


KINDS: Final = (
    Kind("latest", {}, may_evolve=True),
    Kind("versions", {"stored_as_scd_type": 2}, may_evolve=True),
    Kind("versions of a column", {"stored_as_scd_type": 2, "track_history_column_list": ["plain"]}),
    Kind("marked", {"mode": "soft_delete"}, may_evolve=True),
    Kind("changes", {"mode": "append"}, may_evolve=True),
    Kind("masked", {"transform": {"rename": {"large": "long"}, "mask": {"more": "keep_last:1"}}}),
    Kind("masked versions", {"stored_as_scd_type": 2, "transform": {"mask": {"large": "redact"}}}),
    Kind("some columns", {"except_column_list": ["large"]}),
    Kind("partitioned", {"partition_by": ["large"]}),
    Kind("as null", {"unrepresentable": "null"}),
    Kind("computed", {"transform": {"computed": {"both": "concat(large, more)", "twice": "plain + plain"}}}),
    Kind("filtered", {"transform": {"where": "plain IS NULL OR plain % 3 <> 0"}}),
    Kind("filtered whole", {"transform": {"where": "length(large) > 1"}}, is_whole=True),
    Kind("python", {"transform": {"python": f"{__name__}:tripled"}}, is_whole=True),
    Kind("keyless", {}, is_whole=True, has_key=False),
    Kind("keyless masked", {"transform": {"mask": {"more": "redact"}}}, is_whole=True, has_key=False),
    Kind("merged", {}, is_merged=True),
)


class ManyKeys(Source):
    """A random history of a table with two dozen keys, some of whose values do not fit their column."""

    def _free(self) -> list[str]:
        return [key for key in KEYS if key not in self.table]

    def _value(self) -> str | None:
        return "" if self.random.random() < UNFIT else super()._value()

    def _truncate(self) -> None:
        if self.random.random() < RARE:
            super()._truncate()

    def _copy(self) -> None:
        if self.random.random() < RARE:
            super()._copy()


def name_of(relation: int, kind: Kind) -> str:
    """The name of a table."""
    return f"{'merged' if kind.is_merged else 'table'}{relation}"


def schema_for(relation: int, kind: Kind) -> TableSchema:
    """A table whose column `plain` is an integer: the model's empty text does not fit."""
    made = schema_of(relation, "plain", "large", "more")
    columns = [
        replace(column, type_oid=23, type_name="integer") if column.id == PLAIN else column for column in made.columns
    ]
    if kind.has_key:
        return replace(made, name=name_of(relation, kind), columns=tuple(columns))
    columns = [replace(column, key=None) for column in columns]
    return replace(made, name=name_of(relation, kind), columns=tuple(columns), replica_identity=ReplicaIdentity.FULL)


def random_log(kinds: Sequence[Kind], random: Random) -> list[list[Row]]:
    """The transactions of one table of each kind; no two tables have a position in common."""
    rows: list[Row] = []
    for relation, kind in enumerate(kinds, start=1):
        rows += _rows_of_table(relation, kind, Random(random.random()))
    return transactions(sorted(rows, key=lambda row: (row["position"], row["ordinal"])))


def _rows_of_table(relation: int, kind: Kind, random: Random) -> list[Row]:
    source = ManyKeys(relation, random)
    for _ in range(random.randint(6, 30)):
        source.transaction()
    first = schema_for(relation, kind)
    rows = _with_all_columns(source.log) if kind.is_whole else source.log
    if not kind.has_key:
        rows = [row | {"key": None, "old_key": None} for row in rows if row["op"] != "d" or row["before"]]
    if kind.may_evolve and random.random() < 0.5:
        rows = _with_changed_columns(rows, first, random)
    begin = log_row(relation, (9, 0), "s", payload=first.to_json())
    copied = log_row(relation, (9, 1), "g", payload=b"9")
    topic = f"shop.{first.name}"
    return [_placed(row, relation) | {"topic": topic} for row in (begin, copied, *rows)]


def _placed(row: Row, relation: int) -> Row:
    """The row at a position of its own table, and for the sink `lake` or for another one."""
    address = row["address"] if row["address"] in (None, OTHER_SINK) else "lake"
    placed = row | {"position": row["position"] * SPREAD + relation}
    if row["op"] == "g":
        placed["payload"] = str(int(row["payload"]) * SPREAD).encode()
    return placed | {"address": address}


def _with_all_columns(rows: Sequence[Row]) -> list[Row]:
    """The same changes of a table whose replica identity is FULL."""
    whole: list[Row] = []
    images: dict[str, Image] = {}
    moving: Image = {}
    for row in rows:
        key = row["key"][0] if row["key"] else ""
        if row["address"] == OTHER_SINK:
            whole.append(row)
        elif row["op"] == "t":
            images.clear()
            whole.append(row)
        elif row["op"] == "g":
            copied = {kept["key"][0] for kept in whole if kept["op"] == "r" and kept["position"] == row["position"]}
            images = {kept: image for kept, image in images.items() if kept in copied}
            whole.append(row)
        elif row["op"] == "d":
            moving = images.pop(key)
            whole.append(row | {"before": dict(moving)})
        else:
            before = moving if row["old_key"] else images.get(key, {})
            images[key] = (before if row["partial"] else {}) | row["after"]
            changed = {"before": dict(before)} if row["op"] == "u" else {}
            whole.append(row | {"after": dict(images[key]), "partial": False} | changed)
    return whole


def _with_changed_columns(rows: Sequence[Row], first: TableSchema, random: Random) -> list[Row]:
    """The same changes of a table that gains a column with a default, renames one and widens one."""
    # a row that moves is two changes, with nothing between them
    places = [number for number, row in enumerate(rows) if row["old_key"] is None and row["op"] not in "rg"]
    steps = dict(zip(random.sample(places, min(3, len(places))), (_with_grade, _renamed, _widened), strict=False))
    schema, changed = first, list[Row]()
    added = 0
    for number, row in enumerate(rows):
        added = added if changed and changed[-1]["position"] == row["position"] else 0
        if number in steps:
            schema = steps[number](schema)
            place = (row["position"], row["ordinal"] + added)
            changed.append(log_row(schema.relation, place, "s", payload=schema.to_json()))
            added += 1
        changed.append(_sent(row, schema, random) | {"ordinal": row["ordinal"] + added})
    return changed


def _with_grade(schema: TableSchema) -> TableSchema:
    grade = Column(id=GRADE, name="grade", type_oid=25, type_name="text", key=None, missing=DEFAULT)
    return replace(schema, columns=(*schema.columns, grade))


def _renamed(schema: TableSchema) -> TableSchema:
    return _with_column(schema, LARGE, lambda column: replace(column, name="big"))


def _widened(schema: TableSchema) -> TableSchema:
    return _with_column(schema, PLAIN, lambda column: replace(column, type_oid=20, type_name="bigint"))


def _with_column(schema: TableSchema, number: int, change: Callable[[Column], Column]) -> TableSchema:
    columns = (change(column) if column.id == number else column for column in schema.columns)
    return replace(schema, columns=tuple(columns))


def _sent(row: Row, schema: TableSchema, random: Random) -> Row:
    """A row as the table sends it that has these columns."""
    if row["after"] is None or row["address"] == OTHER_SINK:
        return row
    types = {column.id: column.type_name for column in schema.columns}
    number = row["after"][PLAIN]
    if number and types[PLAIN] == "bigint" and random.random() < 0.5:
        number = str(int(number) + MANY)
    image: Image = {**row["after"], PLAIN: number}
    if GRADE in types:
        image[GRADE] = random.choice((DEFAULT, "better", None))
    return row | {"after": image}
