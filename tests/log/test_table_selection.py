"""Only: what is ruled out by bounds has no wanted row, and what is wanted is found."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log.disk_format import PARQUET, LogFile
from cdc.log.file_selection import TableSelection
from cdc.log.reader import LogReader, read_file
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import matches
from tests.fixtures.examples import examples
from tests.fixtures.spent import bytes_read
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

names = st.text("ab.", min_size=1, max_size=4)
globs = st.lists(st.text("ab.*?[]!", min_size=1, max_size=5), max_size=2).map(tuple)
numbers = st.tuples(st.integers(0, 6), st.integers(0, 6))


@given(st.lists(st.tuples(st.integers(0, 6), names), min_size=1, max_size=5), globs, st.none() | numbers)
def test_bounds_that_rule_rows_out_are_those_of_rows_that_are_not_wanted(
    rows: list[tuple[int, str]], globs: tuple[str, ...], relations: tuple[int, int] | None
):
    only = TableSelection(relations=relations, globs=globs)
    bounds = {
        "relation": (min(number for number, _ in rows), max(number for number, _ in rows)),
        "topic": (min(name for _, name in rows), max(name for _, name in rows)),
    }
    wanted = [
        (number, name)
        for number, name in rows
        if (relations is None or relations[0] <= number <= relations[1]) and (not globs or matches(name, globs))
    ]
    assert only.may_be_in(bounds) or not wanted
    assert only.may_be_in({})


@examples(25)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["s.a", "s.b", "s.c", None])), min_size=1, max_size=12),
    st.tuples(st.integers(0, 13), st.integers(0, 13)),
    st.sampled_from(
        [
            TableSelection(),
            TableSelection(relations=(2, 3)),
            TableSelection(globs=("s.a", "*c")),
            TableSelection(relations=(1, 1), globs=("*.b",)),
        ]
    ),
)
def test_a_file_of_many_row_groups_gives_the_wanted_rows_of_the_range(
    tmp_path_factory: pytest.TempPathFactory,
    said: list[tuple[int, str | None]],
    bounds: tuple[int, int],
    only: TableSelection,
):
    rows = [row(at, relation=number, topic=topic) for at, (number, topic) in enumerate(said, 1)]
    file = written(tmp_path_factory.mktemp("only"), table(*rows), row_group_size=2)
    after, upto = bounds
    expected = [
        row["position"]
        for row in rows
        if after < row["position"] <= upto
        and (only.relations is None or only.relations[0] <= row["relation"] <= only.relations[1])
        and (not only.globs or (row["topic"] is not None and matches(row["topic"], only.globs)))
    ]
    for columns in (None, ["position"], ["op", "position"]):
        found = read_file(file, Position(after), Position(upto), columns, only)
        assert found["position"].to_pylist() == expected
        assert found.column_names == (columns or LOG_SCHEMA.names)


def written(folder: Path, rows: pa.Table, row_group_size: int) -> LogFile:
    path = folder / "rows.parquet"
    pq.write_table(rows, path, row_group_size=row_group_size, **PARQUET)
    return LogFile(
        path=str(path),
        rows=rows.num_rows,
        size=path.stat().st_size,
        first=Position(rows["position"][0].as_py()),
        last=Position(rows["position"][-1].as_py()),
        segment=0,
    )


def test_a_program_reads_one_table_of_a_range_as_arrow_and_names_its_columns(tmp_path: Path):
    orders, items = schema_of(16384, "note"), replace(schema_of(2), name="items")
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    versions = [
        row(9, n, op="s", relation=t.relation, topic=t.topic, payload=t.to_json())
        for n, t in enumerate((orders, items))
    ]
    for rows in (versions, [row(10, 0), row(10, 1, relation=2, topic="shop.items")], [row(20, 0)]):
        writer.commit(writer.stage(table(*rows)), info(rows[-1]["position"]))
    log = LogReader(tmp_path)

    batches = log.rows(Position.parse("0/9"), Position(20), only=TableSelection(globs=("shop.orders",)))
    found = pa.Table.from_batches(batches, LOG_SCHEMA)
    assert found.select(["position", "ordinal"]).to_pylist() == [{"position": p, "ordinal": 0} for p in (10, 20)]
    columns = {c.id: c.name for schema in log.schemas().values() if schema.topic == "shop.orders" for c in schema.sent}
    (first, *_) = found["after"].to_pylist(maps_as_pydicts="strict")
    assert {columns[number]: text for number, text in first.items()} == {"id": "0", "note": None}


TABLES, ROWS_EACH, IMAGE = 1_000, 64, 1_000


def test_the_changes_of_one_table_of_a_thousand_cost_a_fiftieth_of_the_bytes(tmp_path: Path):
    """A settled file as small as shows it: row groups of a two-hundredth of the file, of 320 kB each."""
    count = TABLES * ROWS_EACH
    relations = np.repeat(np.arange(TABLES), ROWS_EACH) + 16_384
    noise = os.urandom(count * IMAGE // 2).hex().encode()
    offsets = np.arange(count + 1, dtype=np.int32) * IMAGE
    images = pa.StringArray.from_buffers(count, pa.py_buffer(offsets), pa.py_buffer(noise))
    said = {
        "position": np.arange(1, count + 1),
        "ordinal": np.zeros(count, np.int64),
        "xid": np.arange(count),
        "committed_at": pa.array(np.arange(count)).cast(pa.timestamp("us", "UTC")),
        "relation": relations,
        "topic": pa.array([f"shop.t{n}" for n in range(TABLES)]).take(pa.array(relations - 16_384)),
        "op": pa.repeat("c", count),
        "partial": np.zeros(count, bool),
        "after": pa.MapArray.from_arrays(np.arange(count + 1, dtype=np.int32), np.ones(count, np.int32), images),
    }
    columns = [said.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
    file = written(tmp_path, pa.table(columns, names=LOG_SCHEMA.names).cast(LOG_SCHEMA), row_group_size=count // 200)

    for only in (TableSelection(relations=(16_384 + 500, 16_384 + 500)), TableSelection(globs=("shop.t500",))):
        before = bytes_read()
        found = read_file(file, Position(0), file.last, only=only)
        assert found.num_rows == ROWS_EACH
        assert (bytes_read() - before) / file.size <= 0.02
