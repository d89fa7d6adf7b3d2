"""Purge: rows stay, deleted rows leave the files, and the statistics of rewritten files stay right."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from cdc.target_names import POSITION_COLUMN
from pipelines.sinks.delta.indexed.deletion_vectors import DamagedVector, encode
from pipelines.sinks.delta.indexed.delta_log import LiveFile, LiveFiles, vector_paths
from pipelines.sinks.delta.purge_deleted_rows import AT_ONCE, files_to_purge, purge
from tests.fixtures.examples import examples
from tests.pipelines.sinks.added_features import commit
from tests.pipelines.sinks.delta.vector_tables import (
    COLUMNS,
    Row,
    VectorTable,
    columns_of,
    delete,
    rows_in,
    source_of,
    upsert,
    without_op,
)

SIGNATURE: Final = {"app": "mine"}
WIDE: Final = columns_of(
    ("id", pa.int64()),
    ("n", pa.int64()),
    ("text", pa.string()),
    ("at", pa.timestamp("us", tz="UTC")),
    ("p", pa.string()),
)
NOON: Final = datetime(2026, 1, 2, 12, tzinfo=ZoneInfo("UTC"))
PREDICATES: Final = [
    *(f"{name} IS {null}" for name in ("n", "text", "at") for null in ("NULL", "NOT NULL")),
    *(f"{name} {operator} 3" for name in ("id", "n") for operator in ("<", "=", ">")),
    *(f"text {operator} 'c'" for operator in ("<", "=", ">")),
    "p = 'a' AND n IS NULL",
]


def purged(table: VectorTable, chosen: list[LiveFile] | None = None) -> bool:
    """Purge the chosen files, otherwise all that are due."""
    files = table.files()
    return purge(table.storage, files, files_to_purge(files) if chosen is None else chosen, SIGNATURE)


def check_statistics(uri: str, file: LiveFile) -> None:
    """Check the statistics of a file without deleted rows against its content."""
    rows = pq.read_table(Path(uri, file.path))
    assert file.rows == rows.num_rows
    for name, count in file.stats.get("nullCount", {}).items():
        assert rows[name].null_count == count
    for name, low in file.stats.get("minValues", {}).items():
        values = [value for value in rows[name].to_pylist() if value is not None]
        high = file.stats["maxValues"][name]
        assert all(low <= _spelled(value) <= high for value in values)


def _spelled(value: Any) -> Any:
    return value.strftime("%Y-%m-%dT%H:%M:%S.000Z") if isinstance(value, datetime) else value


def check_predicates(uri: str) -> None:
    """Compare reads with predicates, which skip files by statistics, with a filter over all rows."""
    everything = pa.table(DeltaTable(uri).scan())
    for predicate in PREDICATES:
        found = rows_in(uri, predicate=predicate)
        assert found == [row for row in sorted(everything.to_pylist(), key=repr) if _holds(predicate, row)], predicate


def _holds(predicate: str, row: dict[str, Any]) -> bool:
    if " AND " in predicate:
        return all(_holds(part, row) for part in predicate.split(" AND "))
    name, operator, wanted = predicate.split(" ", 2)
    if operator == "IS":
        return (row[name] is None) is (wanted == "NULL")
    value, limit = row[name], wanted.strip("'") if wanted.startswith("'") else int(wanted)
    return value is not None and {"<": value < limit, "=": value == limit, ">": value > limit}[operator]


NUMBERS = st.none() | st.integers(0, 6)
CONTENTS = st.tuples(NUMBERS, st.none() | st.sampled_from(["a", "c", "d"]), st.booleans(), st.sampled_from(["a", "b"]))


@examples(20)
@given(st.lists(st.lists(CONTENTS, min_size=1, max_size=5), min_size=1, max_size=3), st.sets(st.integers(0, 14)))
def test_a_purge_changes_no_row_and_leaves_right_statistics(
    batches: list[list[tuple[int | None, str | None, bool, str]]], deleted: set[int]
) -> None:
    with TemporaryDirectory() as folder:
        table, rows = VectorTable(f"{folder}/table", WIDE, partition_by=("p",)), list[Row]()
        for found in batches:
            new = [
                upsert(1, number, id=len(rows) + number, n=n, text=text, at=NOON if has_time else None, p=p)
                for number, (n, text, has_time, p) in enumerate(found)
            ]
            table.merge(*new)
            rows += new
        table.merge(*(delete(2, number, id=number) for number in deleted))
        live = sorted(repr(without_op(row)) for row in rows if row["id"] not in deleted)
        due = files_to_purge(table.files())
        if due:
            assert purged(table)

        assert [repr(row) for row in table.rows()] == live
        assert files_to_purge(table.files()) == []
        for file in table.files().by_path.values():
            if file.vector is None:
                check_statistics(table.uri, file)
        check_predicates(table.uri)
        table.merge(*(upsert(3, number, id=number, n=1, p="b") for number in range(3)))
        assert len(table.rows()) == len(({*range(len(rows))} - deleted) | {0, 1, 2})
        table.close()


@pytest.fixture(name="many")
def _many(tmp_path: Path) -> VectorTable:
    """A table with four files of four rows each; of the first three files 1, 2 and 3 rows are deleted."""
    table = VectorTable(str(tmp_path / "table"))
    for file in range(4):
        table.merge(*(upsert(1, number, id=file * 4 + number, item=f"{file}") for number in range(4)))
    table.merge(*(delete(2, id=file * 4 + number) for file in range(3) for number in range(file + 1)))
    return table


def left_in(table: VectorTable) -> list[tuple[int, int]]:
    """Return the number of rows and of deleted rows of each file, sorted."""
    return sorted((file.rows or 0, len(file.deleted)) for file in table.files().by_path.values())


def test_the_files_with_a_quarter_of_their_rows_deleted_are_due_the_worst_first(many: VectorTable) -> None:
    assert [len(file.deleted) for file in files_to_purge(many.files())] == [3, 2, 1]
    few = VectorTable(f"{many.uri}.few")
    few.merge(*(upsert(1, number, id=number) for number in range(5)))
    few.merge(delete(2, id=3))

    assert files_to_purge(few.files()) == []


def test_files_without_a_known_number_of_rows_are_not_due(many: VectorTable) -> None:
    files = many.files()
    files.by_path = {path: LiveFile(file.add | {"stats": None}, file.deleted) for path, file in files.by_path.items()}

    assert files_to_purge(files) == []


def test_a_purge_is_one_signed_commit_that_changes_no_rows(many: VectorTable) -> None:
    rows, version = many.rows(), many.files().version
    assert purged(many)
    text = Path(many.uri, "_delta_log", f"{version + 1:020d}.json").read_text(encoding="utf-8")
    actions = [(kind, action) for line in text.splitlines() for kind, action in json.loads(line).items()]

    assert [kind for kind, _ in actions] == ["commitInfo", *["remove"] * 3, *["add"] * 3]
    assert actions[0][1]["app"] == "mine"
    assert [action["dataChange"] for _, action in actions[1:]] == [False] * 6
    assert all("deletionVector" in action for kind, action in actions if kind == "remove")
    assert (many.rows(), left_in(many)) == (rows, [(1, 0), (2, 0), (3, 0), (4, 0)])


def test_the_live_files_of_the_caller_are_those_after_the_purge(many: VectorTable) -> None:
    files = many.files()
    assert purge(many.storage, files, files_to_purge(files), SIGNATURE)

    assert files.version == many.files().version
    assert {path: file.add for path, file in files.by_path.items()} == {
        path: file.add for path, file in many.files().by_path.items()
    }


def test_a_commit_of_another_client_makes_a_purge_do_nothing(many: VectorTable) -> None:
    rows, files = many.rows(), many.files()
    before = dict(files.by_path)
    commit(many.uri)

    assert not purge(many.storage, files, files_to_purge(files), SIGNATURE)
    assert (files.by_path, files.version + 1) == (before, many.files().version)
    assert (many.rows(), left_in(many)) == (rows, [(4, 0), (4, 1), (4, 2), (4, 3)])


SIZES: Final = {
    "all within the limit": ([AT_ONCE // 4] * 3, 3),
    "two within the limit": ([AT_ONCE // 2, AT_ONCE // 2, 1], 2),
    "one": ([AT_ONCE // 2 + 1] * 3, 1),
    "one above the limit": ([AT_ONCE * 3, 1, 1], 1),
}


@pytest.mark.parametrize(("sizes", "rewritten"), SIZES.values(), ids=SIZES)
def test_a_call_rewrites_files_up_to_a_size_and_at_least_one(
    many: VectorTable, sizes: list[int], rewritten: int
) -> None:
    rows = many.rows()
    due = files_to_purge(many.files())
    assert purged(many, [LiveFile(file.add | {"size": size}) for file, size in zip(due, sizes, strict=True)])

    assert [file.add["path"] for file in files_to_purge(many.files())] == [file.add["path"] for file in due[rewritten:]]
    assert many.rows() == rows


def test_deleted_rows_of_a_long_file_are_those_of_its_batches(tmp_path: Path) -> None:
    table, count = VectorTable(str(tmp_path / "table")), 150_000
    rows = pa.table(
        [np.arange(count), pa.nulls(count, pa.string()), np.ones(count, np.int64), np.arange(count)], COLUMNS
    )
    write_deltalake(table.uri, rows, mode="append")
    gone = {*range(60_000, 110_000), 0, (1 << 17) - 1, 1 << 17, count - 1}
    files = table.files()
    (file,) = files.by_path.values()
    path, content, (vector,) = encode([BitMap(gone)])
    table.storage.write(path, content)
    marked = file.without(BitMap(gone), vector)
    files.commit([file.remove(), {"add": marked.add}], [marked])
    assert purged(table)

    assert {row["id"] for row in table.rows()} == {*range(count)} - gone
    assert left_in(table) == [(count - len(gone), 0)]


def test_a_file_without_live_rows_becomes_an_empty_one(many: VectorTable) -> None:
    files = many.files()
    file = files_to_purge(files)[0]
    path, content, (vector,) = encode([BitMap(range(4))])
    many.storage.write(path, content)
    gone = file.without(BitMap(range(4)), vector)
    files.commit([file.remove(), {"add": gone.add}], [gone])
    rows = many.rows()
    assert purged(many)

    assert (len(rows), many.rows()) == (9, rows)
    assert left_in(many)[0] == (0, 0)


def test_a_damaged_vector_stops_a_purge_before_its_commit(many: VectorTable) -> None:
    version = many.files().version
    (path,) = vector_paths(many.files().by_path.values())
    Path(many.uri, path).write_bytes(b"\x01")
    files = LiveFiles.read(many.storage, with_vectors=False)
    with pytest.raises(DamagedVector):
        purge(many.storage, files, files_to_purge(files), SIGNATURE)

    assert (files.version, DeltaTable(many.uri).version()) == (version, version)


def test_a_file_without_deleted_rows_is_refused(many: VectorTable) -> None:
    whole = next(file for file in many.files().by_path.values() if file.vector is None)
    with pytest.raises(ValueError, match="no deleted rows"):
        purged(many, [whole])


def test_the_values_of_a_file_that_delta_rs_wrote_stay(tmp_path: Path) -> None:
    columns = columns_of(
        ("id", pa.int64()), ("text", pa.string()), ("bytes", pa.binary()), ("list", pa.list_(pa.string()))
    )
    table = VectorTable(str(tmp_path / "table"), columns)
    values: list[dict[str, Any]] = [
        {"text": "ü" * 20, "bytes": b"\xff" * 20, "list": ["a", None]},
        {"text": None, "bytes": None, "list": None},
    ]
    table.merge(*(upsert(1, number, id=number, **values[number % 2]) for number in range(4)))
    DeltaTable(table.uri).update(updates={"text": "text || '!'"})
    table.merge(delete(2, id=0))
    rows = table.rows()
    assert purged(table)

    assert table.rows() == rows
    assert [row["text"] for row in rows] == [None, "ü" * 20 + "!", None]


def test_the_times_of_a_file_of_an_older_spark_version_stay(tmp_path: Path) -> None:
    """They are INT96: 64 bits of nanoseconds do not have the year 9999, and Spark reads no nanoseconds."""
    columns = columns_of(("id", pa.int64()), ("at", pa.timestamp("us", tz="UTC")))
    table = VectorTable(str(tmp_path / "table"), columns)
    times = [NOON.replace(year=year) for year in (1, 2026, 9999)]
    rows = source_of(columns, [upsert(1, number, id=number, at=time) for number, time in enumerate(times)])
    pq.write_table(rows.select(columns.names), f"{table.uri}/spark.parquet", use_deprecated_int96_timestamps=True)
    size = Path(table.uri, "spark.parquet").stat().st_size
    add = {"path": "spark.parquet", "size": size, "partitionValues": {}, "modificationTime": 0, "dataChange": True}
    commit(table.uri, {"add": add | {"stats": json.dumps({"numRecords": 3})}})
    table.merge(delete(2, id=1))
    assert purged(table)
    (file,) = table.files().by_path.values()

    assert [row["at"] for row in table.rows()] == [times[0], times[2]]
    assert pq.read_schema(Path(table.uri, file.path)).field("at").type.unit == "us"


STATISTICS: Final[dict[str, tuple[dict[str, int], dict[str, int]]]] = {
    "no nulls": ({"n": 0}, {"n": 0}),
    "only nulls": ({"n": 4}, {"n": 1}),
    "some nulls": ({"n": 2}, {}),
    "unknown": ({}, {}),
}


@pytest.mark.parametrize(("nulls", "expected"), STATISTICS.values(), ids=STATISTICS)
def test_the_number_of_nulls_is_known_if_all_or_none_of_the_values_were_null(
    many: VectorTable, nulls: dict[str, int], expected: dict[str, int]
) -> None:
    file = files_to_purge(many.files())[0]
    stats = json.dumps(file.stats | {"nullCount": nulls})
    assert purged(many, [LiveFile(file.add | {"stats": stats})])
    (new,) = [found for found in many.files().by_path.values() if found.rows == 1]

    assert (new.stats["nullCount"], new.stats["tightBounds"]) == (expected, False)
    assert new.stats["maxValues"][POSITION_COLUMN] == file.stats["maxValues"][POSITION_COLUMN]
