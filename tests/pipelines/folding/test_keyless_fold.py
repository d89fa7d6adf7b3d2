"""Multisets: of equal rows that come and go as many are left as there are, wherever a history is cut."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import MissingBase, SchemaNotApplicable
from cdc.table import ReplicaIdentity, TableSchema, TableState
from cdc.targets.lake_reader import read_target
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.keyless_fold import net_changes, row_ids
from pipelines.sinks.contract import Published, TableBatch, TableRecord
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import column
from tests.fixtures.examples import examples

Image = tuple[str | None, ...]
Change = tuple[int, int, str, Image]
"""Position, ordinal, op and image."""

NAMES = ("note", "price", "times")
BAG = TableSchema(
    relation=7,
    oid=7,
    schema="shop",
    name="bag",
    replica_identity=ReplicaIdentity.FULL,
    columns=(
        column(1, "note"),
        column(2, "price", "double precision", oid=701),
        column(3, "times", "integer", oid=23),
    ),
)
IMAGES: list[Image] = [("a", "1", "1"), ("a", None, "1"), (None, "NaN", "1"), (None, "0", None), (None, "-0", None)]
IMAGES += [("a", "1", "2"), ("", "1", "1"), (None, None, None)]


def told(changes: list[Change], *, sent: int = 3) -> pa.Table:
    """FOLDED rows; sent: how many columns the images have."""
    rows = [
        {"relation": 7, "op": op, "position": position, "ordinal": ordinal, "complete": True}
        | {"committed_at": 0, "after": list(enumerate(image[:sent], 1))}
        for position, ordinal, op, image in changes
    ]
    return pa.Table.from_pylist(rows, FOLDED_ARROW)


def batch(changes: list[Change], after: int, upto: int, schema: TableSchema = BAG, **said: object) -> TableBatch:
    return TableBatch(schema=schema, rows=told(changes), frame=None, after=after, upto=upto, **said)  # type: ignore[arg-type]


def held(record: TableRecord) -> Counter[Image]:
    """The rows of a target, as text."""
    rows = read_target(record.target, record.version).read_all().to_pylist()
    return Counter(tuple(_text(row[name]) for name in NAMES) for row in rows)


def _text(value: object) -> str | None:
    if isinstance(value, float):
        return {"nan": "NaN", "-0.0": "-0"}.get(str(value), str(value).removesuffix(".0"))
    return None if value is None else str(value)


def history(random: Random, count: int) -> tuple[list[Change], dict[int, Counter[Image]]]:
    """Changes, and what the table holds after each transaction, by its position."""
    table, changes, states = Counter[Image](), list[Change](), {0: Counter[Image]()}
    for position in range(1, count + 1):
        for ordinal in range(random.randint(1, 4)):
            before = random.choice(list(table.elements()) or IMAGES)
            op = random.choice("uud" if before in table else "u")
            # an update is both at one place
            if op == "d" or (before in table and random.random() < 0.3):
                changes.append((position, ordinal, "d", before))
                table -= Counter([before])
            if op == "u":
                image = random.choice(IMAGES)
                changes.append((position, ordinal, "u", image))
                table[image] += 1
        states[position] = Counter(table)
    return changes, states


@given(seed=st.integers(0, 2**32 - 1))
def test_what_is_left_are_the_differences_with_the_latest_of_equal_rows(seed: int) -> None:
    random = Random(seed)
    changes = [(n // 3, n % 3, random.choice("ud"), random.choice(IMAGES)) for n in range(random.randint(0, 40))]
    left = net_changes(told(random.sample(changes, len(changes))), BAG).to_pylist()

    for image in IMAGES:
        of_image = {op: [c for c in changes if c[2:] == (op, image)] for op in "ud"}
        more, less = ("u", "d") if len(of_image["u"]) > len(of_image["d"]) else ("d", "u")
        count = len(of_image[more]) - len(of_image[less])
        found = [(r["position"], r["ordinal"], r["op"]) for r in left if tuple(v for _, v in r["after"]) == image]
        assert sorted(found) == [change[:3] for change in of_image[more][len(of_image[more]) - count :]]


def test_a_row_from_before_a_column_was_added_equals_one_that_has_its_default() -> None:
    younger = column(3, "times", "integer", oid=23, missing="5")
    schema = replace(BAG, columns=(*BAG.columns[:2], younger))
    older, newer = told([(1, 0, "u", ("a", "1"))], sent=2), told([(2, 0, "d", ("a", "1", "5"))])
    assert net_changes(pa.concat_tables([older, newer]), schema).num_rows == 0


def test_rows_are_equal_bit_by_bit_and_a_null_equals_a_null() -> None:
    numbers = pa.array([0.0, -0.0, float("nan"), float("nan"), None, None])
    assert row_ids([numbers, pa.nulls(6)], 6).tolist() == pytest.approx([0, 1, 2, 2, 3, 3])
    assert row_ids([], 3).tolist() == [0, 0, 0]


@pytest.fixture(name="sink")
def _sink(request: pytest.FixtureRequest, tmp_path: Path) -> DeltaSink:
    return opened(tmp_path, getattr(request, "param", Writer.COPY_ON_WRITE))


def opened(folder: Path, writer: Writer = Writer.COPY_ON_WRITE, spark: object = None) -> DeltaSink:
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", writer), spark)  # type: ignore[arg-type]
    sink.open("log-1")
    return sink


def published(sink: DeltaSink, record: TableRecord) -> TableRecord:
    sink.publish(Published(record.position, 0, {record.relation: record}))
    return record


@examples(4)
@given(seed=st.integers(0, 2**32 - 1))
def test_a_target_is_the_table_wherever_ranges_end_and_whatever_crashes(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    random, folder = Random(seed), tmp_path_factory.mktemp("bag")
    changes, states = history(random, 12)
    sink, at = opened(folder), 0
    while at < 12:
        end = random.randint(at + 1, 12)
        wanted = [change for change in changes if at < change[0] <= end]
        record = sink.apply(batch(random.sample(wanted, len(wanted)), at, end))
        assert held(record) == states[record.position]
        if random.random() < 0.5:  # else it dies before anybody was told, and the range may come cut in another place
            published(sink, record)
            at = end
        else:
            sink = opened(folder)


@pytest.mark.slow
def test_spark_writes_the_same_multiset(tmp_path: Path, spark: object) -> None:
    changes, states = history(Random(5), 9)
    sink = opened(tmp_path, Writer.SPARK, spark)
    for at in (0, 3, 6):
        rows = [change for change in changes if at < change[0] <= at + 3]
        record = published(sink, sink.apply(batch(rows, at, at + 3)))
        assert held(record) == states[at + 3]


def test_a_delete_of_a_row_that_is_not_there_stops_the_table_and_names_its_place(sink: DeltaSink) -> None:
    sink.apply(batch([(1, 0, "u", IMAGES[0])], 0, 1))
    with pytest.raises(MissingBase, match=r"deletes 1 rows .* at position 0/2"):
        sink.apply(batch([(2, 0, "d", IMAGES[0]), (3, 1, "d", IMAGES[0])], 1, 3))


def test_while_the_table_is_copied_such_a_delete_takes_nothing(sink: DeltaSink) -> None:
    copying = BAG.flagged(TableState.SNAPSHOTTING, "a copy")
    record = sink.apply(batch([(1, 0, "u", IMAGES[0]), (1, 1, "d", IMAGES[1])], 0, 1, copying))
    assert held(record) == Counter([IMAGES[0]])


def test_a_truncate_takes_all_that_stands_before_it_and_nothing_behind(sink: DeltaSink) -> None:
    published(sink, sink.apply(batch([(1, 0, "u", IMAGES[0]), (1, 1, "u", IMAGES[0])], 0, 1)))
    record = sink.apply(batch([(2, 1, "u", IMAGES[0])], 1, 2, truncated=(2, 0), generation=2))
    assert held(record) == Counter([IMAGES[0]])


def test_a_table_that_gains_or_loses_its_key_has_to_be_built_anew(sink: DeltaSink) -> None:
    sink.apply(batch([(1, 0, "u", IMAGES[0])], 0, 1))
    keyed = replace(BAG, columns=(column(1, "note", key=0), *BAG.columns[1:]))
    with pytest.raises(SchemaNotApplicable, match="now has a key"):
        sink.apply(batch([], 1, 2, keyed))
