"""Logs of a small table, which may change its columns or lie under a rule, and targets that get them in any batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from cdc.config import SinkRule
from cdc.errors import ValueNotRepresentable
from cdc.table import Column, TableSchema
from tests.contracts.folded import column
from tests.contracts.histories import RELATION, TABLE, Lake, Table
from tests.pipelines.fold_model import OTHER_SINK, PLAIN, Image, Row, Source, log_row

LARGE, HUGE, GRADE = 3, 4, 5
MANY: Final = 2**40
"""More than an integer holds."""
DEFAULT: Final = "new"


@dataclass(frozen=True)
class Story:
    """A log, and what its target is made of in the end."""

    rows: list[Row]
    told: list[Row]
    """The rows as a target that was built anew would see them."""
    first: TableSchema = TABLE
    """The table as it begins."""
    shown: TableSchema = TABLE
    """The target's columns, by their ids at the source, as they are in the end."""
    rules: tuple[SinkRule, ...] = ()

    def schema_at(self, position: int) -> TableSchema:
        """The table as it is there."""
        said = [row["payload"] for row in self.rows if row["op"] == "s" and row["position"] <= position]
        return TableSchema.from_json(said[-1]) if said else self.first


def log(random: Random, transactions: int = 20) -> list[Row]:
    """Changes of every kind, some of them partial, truncates and copies."""
    source = Source(RELATION, random)
    for _ in range(transactions):
        source.transaction()
    return source.log


def sent_whole(rows: Iterable[Row]) -> list[Row]:
    """The same changes of a table that sends every column with each of them."""
    table, found = Table(), list[Row]()
    for row in rows:
        image = None if row["address"] == OTHER_SINK else table.apply(row)
        found.append(row if image is None else row | {"after": dict(image), "partial": False})
    return found


def evolving(rows: list[Row], random: Random) -> Story:
    """The same changes of a table that in between gains a column with a default, renames one and widens one."""
    # a row that moves is two changes, with nothing between them
    places = [n for n, row in enumerate(rows) if row["old_key"] is None and len(rows) < 4 * n]
    steps = dict(zip(random.sample(places, 3), (_with_grade, _renamed, _widened), strict=True))
    first = now = _of_type(TABLE, 23, "integer")
    found, more = list[Row](), Counter[int]()
    for number, row in enumerate(rows):
        position = row["position"]
        if number in steps:
            now = steps[number](now)
            found.append(log_row(RELATION, (position, row["ordinal"] + more[position]), "s", payload=now.to_json()))
            more[position] += 1
        found.append(_sent(row, now, random) | {"ordinal": row["ordinal"] + more[position]})
    return Story(found, [_with_default(row) for row in found], first, now)


def ruled(story: Story, **transform: object) -> Story:
    """The same for a target that has the last characters of one column alone, under another name."""
    said = {"rename": {"huge": "long"}, "mask": {"huge": "keep_last:1"}, **transform}
    columns = tuple(replace(c, name="long") if c.id == HUGE else c for c in story.shown.columns)
    return replace(
        story,
        told=[_masked(row) for row in story.told],
        shown=replace(story.shown, columns=columns),
        rules=(SinkRule.model_validate({"match": "t.*", "transform": said}),),
    )


def drive(lake: Lake, story: Story, random: Random, most: int = 8) -> None:
    """Batches that end anywhere; some come twice, for a driver died before it could tell, and some after later ones.

    most: how many positions one of them spans.
    """
    ends = sorted({row["position"] for row in story.rows})
    after, ahead, done = 0, 0, list[tuple[int, int]]()
    while after < ends[-1]:
        # a table that stands further than the cut is brought there first, as the loop does it
        later = [end for end in ends if after < end <= (ahead if ahead > after else ends[-1])][:most]
        if random.random() < 0.4:
            _die(lake, story, random, (after, random.choice(later)))
        upto = random.choice(later)
        record = lake.apply(story.rows, after, upto, story.schema_at(upto))
        lake.publish(record, upto)
        done.append((after, upto))
        after, ahead = upto, record.position
        if random.random() < 0.2:
            again = random.choice(done)
            lake.apply(story.rows, *again, story.schema_at(again[1]))


def _die(lake: Lake, story: Story, random: Random, span: tuple[int, int]) -> None:
    """A driver that goes no further than its batch, or than the columns of that: one row of it is no row."""
    after, upto = span
    rows = [log_row(RELATION, (upto, MANY), "c", key=["?"], after={1: "?"})] if random.random() < 0.5 else []
    with suppress(ValueNotRepresentable):
        lake.apply([*story.rows, *rows], after, upto, story.schema_at(upto))
    lake.start()


def _of_type(schema: TableSchema, oid: int, name: str) -> TableSchema:
    """The table with plain values of another type."""
    return _changed(schema, PLAIN, type_oid=oid, type_name=name)


def _changed(schema: TableSchema, id_: int, **said: object) -> TableSchema:
    columns = [replace(held, **said) if held.id == id_ else held for held in schema.columns]  # type: ignore[arg-type]
    return replace(schema, columns=tuple(columns))


def _with_grade(schema: TableSchema) -> TableSchema:
    grade: Column = column(GRADE, "grade", missing=DEFAULT)
    return replace(schema, columns=(*schema.columns, grade))


def _renamed(schema: TableSchema) -> TableSchema:
    return _changed(schema, LARGE, name="big")


def _widened(schema: TableSchema) -> TableSchema:
    return _of_type(schema, 20, "bigint")


def _sent(row: Row, schema: TableSchema, random: Random) -> Row:
    """A row as the table sends it that has these columns."""
    if row["after"] is None or row["address"] == OTHER_SINK:
        return row
    kinds = {held.id: held.type_name for held in schema.columns}
    number = row["after"][PLAIN] or None
    if number is not None and kinds[PLAIN] == "bigint" and random.random() < 0.5:
        number = str(int(number) + MANY)
    image: Image = {**row["after"], PLAIN: number}
    if GRADE in kinds:  # with every change, for no row of before has it in a file of its own
        image[GRADE] = random.choice((DEFAULT, "better", None))
    return row | {"after": image}


def _with_default(row: Row) -> Row:
    """A row with what those from before a column was added hold there."""
    if row["after"] is None or row["partial"]:
        return row
    return row | {"after": {GRADE: DEFAULT, **row["after"]}}


def _masked(row: Row) -> Row:
    if row["after"] is None or row["after"].get(HUGE) is None:
        return row
    text = row["after"][HUGE]
    shown = text[-1:] if len(text) > 1 else ""
    return row | {"after": {**row["after"], HUGE: shown.rjust(len(text), "*")}}


def history(seed: int, transactions: int) -> tuple[list[Row], list[int]]:
    """(the log of a small table, the positions that a batch can end at)."""
    rows = log(Random(seed), transactions)
    return rows, sorted({row["position"] for row in rows})
