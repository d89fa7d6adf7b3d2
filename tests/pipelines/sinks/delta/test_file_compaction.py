"""Rewriting of files: rows stay, deleted rows leave the files, changes meanwhile count, and statistics are right."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from hypothesis import given
from hypothesis import strategies as st
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import encode
from pipelines.sinks.delta import file_compaction
from pipelines.sinks.delta.file_compaction import (
    DELETED,
    TOGETHER,
    RewrittenFile,
    files_with_deleted_rows,
    small_files,
    together,
)
from pipelines.sinks.delta.indexed.delta_log import ATTEMPTS, LiveFile, LiveFiles
from pipelines.sinks.delta.target_columns import OP
from tests.fixtures.examples import examples
from tests.pipelines.sinks.added_features import commit
from tests.pipelines.sinks.delta.vector_tables import (
    COLUMNS,
    OthersFirst,
    Row,
    VectorTable,
    columns_of,
    delete,
    rows_in,
    source_of,
    upsert,
    without_op,
)

KINDS: Final = ["upsert", "delete", "delete", "delete", "other", "restore"]
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


def due_in(table: VectorTable) -> list[LiveFile]:
    """Return the files that are due for their deleted rows."""
    return files_with_deleted_rows(table.files().by_path.values())


def written(table: VectorTable, chosen: list[LiveFile]) -> RewrittenFile:
    """Write the live rows of files to a new one that no commit has added."""
    return file_compaction.write(table.storage, chosen, table.columns.names, table.columns.names, lambda _: None)


def rewritten(table: VectorTable, chosen: list[LiveFile]) -> bool:
    """Rewrite files into one."""
    return file_compaction.commit(table.storage, table.files(), written(table, chosen), SIGNATURE)


def rewrite_due(table: VectorTable) -> None:
    """Rewrite all files that are due for their deleted rows."""
    while due := due_in(table):
        assert rewritten(table, together(due))


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
    table = DeltaTable(uri)
    everything = sorted(pa.table(table.scan()).to_pylist(), key=repr)
    for predicate in PREDICATES:
        found = sorted(pa.table(table.scan(predicate=predicate)).to_pylist(), key=repr)
        assert found == [row for row in everything if _holds(predicate, row)], predicate


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


@examples(5)
@given(st.lists(st.lists(CONTENTS, min_size=1, max_size=5), min_size=1, max_size=3), st.sets(st.integers(0, 14)))
def test_a_rewrite_changes_no_row_and_leaves_right_statistics(
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
        rewrite_due(table)
        while small := small_files(table.files().by_path.values(), 1 << 20):
            assert rewritten(table, small)

        assert [repr(row) for row in table.rows()] == live
        assert due_in(table) == []
        assert len(table.files().by_path) <= 2  # one file for each partition
        for file in table.files().by_path.values():
            if file.vector is None:
                check_statistics(table.uri, file)
        check_predicates(table.uri)
        table.merge(*(upsert(3, number, id=number, n=1, p="b") for number in range(3)))
        assert len(table.rows()) == len(({*range(len(rows))} - deleted) | {0, 1, 2})
        table.close()


@pytest.mark.parametrize("seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 300))])
def test_changes_during_a_rewrite_are_not_lost(tmp_path: Path, seed: int) -> None:
    random, table, model = Random(seed), VectorTable(f"{tmp_path}/table"), Model()

    def change(count: int, kinds: Sequence[str]) -> None:
        for _ in range(count):
            model.change(table, random.choice(kinds), random.randrange(14))

    for first in (0, 4, 8):
        model.merge(table, *(upsert(0, number, id=first + number, item="") for number in range(4)))
    change(random.randrange(6), KINDS)
    table.table.read_commits()
    sources = [file for _, file in sorted(table.table.files.by_path.items()) if random.random() < 0.7]
    if sources:
        done = table.table.rewrite(sources, COLUMNS.names, COLUMNS.names, lambda _: None)
        change(random.randrange(5), random.choice([KINDS, ["upsert", "delete"]]))
        table.table.commit_rewrite(done, SIGNATURE)
    assert model.items == dict(items_in(table))
    change(6, ["upsert", "delete"])
    assert model.items == dict(items_in(table))
    table.close()


class Model:
    """The rows that a table should have, and the versions to which another client may restore it."""

    def __init__(self) -> None:
        self.items: dict[int, str] = {}
        self._position = 0
        self._versions: dict[int, dict[int, str]] = {}

    def merge(self, table: VectorTable, *rows: Row) -> None:
        """Merge rows in the table and here."""
        table.merge(*rows)
        for row in rows:
            if row[OP] == "u":
                self.items[row["id"]] = row["item"]
            else:
                self.items.pop(row["id"], None)
        self._versions[table.table.files.version] = dict(self.items)

    def change(self, table: VectorTable, kind: str, number: int) -> None:
        """Merge one row, or let another client change the table."""
        self._position += 1
        if kind == "upsert":
            self.merge(table, upsert(self._position, id=number, item=f"v{self._position}"))
        elif kind == "delete":
            self.merge(table, delete(self._position, id=number))
        elif kind == "other" and self.items:
            other = DeltaTable(table.uri)
            other.update(updates={"item": "'other'"}, predicate=f"id % 4 = {number % 4}")
            self.items = {key: "other" if key % 4 == number % 4 else item for key, item in self.items.items()}
            self._versions[other.version()] = dict(self.items)
        elif kind == "restore" and self._versions:
            version = sorted(self._versions)[number % len(self._versions)]
            other = DeltaTable(table.uri)
            if version == other.version():
                return
            other.restore(version)
            self.items = dict(self._versions[version])


@pytest.fixture(name="many")
def _many(tmp_path: Path) -> VectorTable:
    """A table with four files of four rows each; of the first three files 1, 2 and 3 rows are deleted."""
    table = VectorTable(str(tmp_path / "table"))
    for file in range(4):
        table.merge(*(upsert(1, number, id=file * 4 + number, item=f"{file}") for number in range(4)))
    table.merge(*(delete(2, id=file * 4 + number) for file in range(3) for number in range(file + 1)))
    return table


def items_in(table: VectorTable) -> list[tuple[int, str]]:
    """Return (id, item) of each row."""
    return sorted((row["id"], row["item"]) for row in table.rows())


def left_in(table: VectorTable) -> list[tuple[int, int]]:
    """Return the number of rows and of deleted rows of each file, sorted."""
    return sorted((file.rows or 0, len(file.deleted)) for file in table.files().by_path.values())


def test_the_files_with_a_sixth_of_their_rows_deleted_are_due_the_worst_first(many: VectorTable) -> None:
    assert [len(file.deleted) for file in due_in(many)] == [3, 2, 1]
    few = VectorTable(f"{many.uri}.few")
    few.merge(*(upsert(1, number, id=number) for number in range(DELETED + 1)))
    few.merge(delete(2, id=3))
    assert due_in(few) == []

    few.merge(*(upsert(3, number, id=number + 10) for number in range(DELETED)))
    few.merge(delete(4, id=10))
    assert [file.rows for file in due_in(few)] == [DELETED]


def test_files_without_a_known_number_of_rows_are_not_due(many: VectorTable) -> None:
    files = [LiveFile(file.add | {"stats": None}, file.deleted) for file in many.files().by_path.values()]

    assert files_with_deleted_rows(files) == []


def sized(number: int, size: int, partition: str = "a") -> LiveFile:
    return LiveFile({"path": f"{number}", "size": size, "partitionValues": {"p": partition}})


def test_small_files_are_those_of_the_partition_with_the_most_of_them() -> None:
    files = [sized(1, 3), sized(2, 1), sized(3, 10), sized(4, 1, "b"), sized(5, 10, "b"), sized(6, 10, "b")]

    assert [file.path for file in small_files(files, 10)] == ["2", "1"]
    assert small_files(files[2:], 10) == []
    assert small_files([], 10) == []


SIZES: Final = {
    "all within the limit": ([TOGETHER // 4] * 3, 3),
    "two within the limit": ([TOGETHER // 2, TOGETHER // 2, 1], 2),
    "one": ([TOGETHER // 2 + 1] * 3, 1),
    "one above the limit": ([TOGETHER * 3, 1, 1], 1),
}


@pytest.mark.parametrize(("sizes", "expected"), SIZES.values(), ids=SIZES)
def test_files_of_one_partition_are_rewritten_together_up_to_a_size(sizes: list[int], expected: int) -> None:
    files = [sized(0, sizes[0]), sized(9, 1, "b"), *(sized(number, size) for number, size in enumerate(sizes[1:], 1))]

    assert [file.path for file in together(files)] == [str(number) for number in range(expected)]
    assert together([]) == []


def test_a_rewrite_is_one_signed_commit_that_changes_no_rows(many: VectorTable) -> None:
    rows, version, due = many.rows(), many.files().version, due_in(many)
    assert rewritten(many, due)
    text = Path(many.uri, "_delta_log", f"{version + 1:020d}.json").read_text(encoding="utf-8")
    actions = [(kind, action) for line in text.splitlines() for kind, action in json.loads(line).items()]

    assert [kind for kind, _ in actions] == ["commitInfo", *["remove"] * 3, "add"]
    assert actions[0][1]["app"] == "mine"
    assert [action["dataChange"] for _, action in actions[1:]] == [False] * 4
    assert all("deletionVector" in action for kind, action in actions if kind == "remove")
    assert actions[-1][1]["modificationTime"] == max(file.add["modificationTime"] for file in due)
    assert (many.rows(), left_in(many)) == (rows, [(4, 0), (6, 0)])


def test_the_live_files_of_the_caller_are_those_after_the_commit(many: VectorTable) -> None:
    files = many.files()
    assert file_compaction.commit(many.storage, files, written(many, due_in(many)), SIGNATURE)

    assert files.version == many.files().version
    assert {path: file.add for path, file in files.by_path.items()} == {
        path: file.add for path, file in many.files().by_path.items()
    }


def test_after_a_commit_of_another_client_the_rewrite_is_committed_all_the_same(many: VectorTable) -> None:
    rows, files, done = many.rows(), many.files(), written(many, due_in(many))
    commit(many.uri)

    assert file_compaction.commit(many.storage, files, done, SIGNATURE)
    assert (many.rows(), left_in(many)) == (rows, [(4, 0), (6, 0)])


def test_a_changed_table_gets_no_file_of_the_old_one(many: VectorTable) -> None:
    rows, files, done = many.rows(), many.files(), written(many, due_in(many))
    DeltaTable(many.uri).alter.set_table_properties({"owner": "me"}, raise_if_not_exists=False)

    assert not file_compaction.commit(many.storage, files, done, SIGNATURE)
    assert (many.rows(), left_in(many)) == (rows, [(4, 0), (4, 1), (4, 2), (4, 3)])


def test_rows_that_were_all_deleted_meanwhile_leave_no_file(many: VectorTable) -> None:
    done = written(many, due_in(many)[:1])
    many.merge(*(delete(3, id=row["id"]) for row in many.rows()))
    many.merge(upsert(4, id=1, item="back"))
    files = many.files()

    assert not file_compaction.commit(many.storage, files, done, SIGNATURE)  # the file was removed with its last row
    assert items_in(many) == [(1, "back")]


def test_a_row_that_was_deleted_meanwhile_is_the_right_one(many: VectorTable) -> None:
    done = written(many, due_in(many))
    many.merge(delete(3, id=3), delete(3, id=6))
    rows = many.rows()

    assert file_compaction.commit(many.storage, many.files(), done, SIGNATURE)
    assert (many.rows(), left_in(many)) == (rows, [(4, 0), (6, 2)])


def test_a_row_that_was_undeleted_meanwhile_is_not_lost(many: VectorTable) -> None:
    version = many.files().version
    many.merge(delete(3, id=3))
    done = written(many, due_in(many))
    DeltaTable(many.uri).restore(version)
    rows = many.rows()

    assert not file_compaction.commit(many.storage, many.files(), done, SIGNATURE)
    assert (many.rows(), 3 in {row["id"] for row in rows}) == (rows, True)


def test_a_new_file_that_a_vacuum_deleted_is_not_committed(many: VectorTable) -> None:
    chosen = due_in(many)[:1]
    done, before = written(many, chosen), rows_in(many.uri)
    Path(many.uri, done.file.path).unlink()
    assert not file_compaction.commit(many.storage, many.files(), done, SIGNATURE)
    assert rows_in(many.uri) == before


def test_a_commit_ends_after_some_attempts(many: VectorTable) -> None:
    others = [lambda: commit(many.uri)] * ATTEMPTS
    storage = OthersFirst(Path(many.uri), list(others))
    rows, done = many.rows(), written(many, due_in(many))

    assert not file_compaction.commit(storage, LiveFiles.read(storage), done, SIGNATURE)
    assert file_compaction.commit(storage, LiveFiles.read(storage), done, SIGNATURE)
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
    rewrite_due(table)

    ids = pa.table(DeltaTable(table.uri).scan(columns=["id"]))["id"].to_pylist()
    assert (len(ids), {*ids}) == (count - len(gone), {*range(count)} - gone)
    assert left_in(table) == [(count - len(gone), 0)]


def test_a_file_without_live_rows_is_removed(many: VectorTable) -> None:
    files = many.files()
    file = due_in(many)[0]
    path, content, (vector,) = encode([BitMap(range(4))])
    many.storage.write(path, content)
    gone = file.without(BitMap(range(4)), vector)
    files.commit([file.remove(), {"add": gone.add}], [gone])
    rows = many.rows()
    assert rewritten(many, due_in(many)[:1])

    assert (len(rows), many.rows()) == (9, rows)
    assert left_in(many) == [(4, 0), (4, 1), (4, 2)]


def test_columns_that_the_table_no_longer_has_are_left_out(many: VectorTable) -> None:
    done = file_compaction.write(many.storage, due_in(many), ["id"], ["id"], lambda _: None)

    assert pq.read_schema(Path(many.uri, done.file.path)).names == ["id"]
    assert {*done.file.stats["nullCount"]} == {"id"}


def test_files_with_other_columns_get_nulls(many: VectorTable) -> None:
    DeltaTable(many.uri).alter.add_columns([Field("note", PrimitiveType("string"))])
    many.columns = many.columns.append(pa.field("note", pa.string()))
    many.reopen()
    many.merge(upsert(3, id=0, item="x", note="n"), upsert(3, id=20, item="x", note=None))
    rows = many.rows()
    assert rewritten(many, list(many.files().by_path.values()))

    assert many.rows() == rows
    assert left_in(many) == [(12, 0)]
    (file,) = many.files().by_path.values()
    check_statistics(many.uri, file)


def test_the_rows_of_the_largest_file_decide_which_columns_get_a_dictionary(many: VectorTable) -> None:
    def dictionaries(chosen: Sequence[LiveFile]) -> set[str]:
        group = pq.ParquetFile(Path(many.uri, written(many, list(chosen)).file.path)).metadata.row_group(0)
        columns = [group.column(number) for number in range(group.num_columns)]
        return {column.path_in_schema for column in columns if column.has_dictionary_page} & {"id", "item"}

    many.merge(*(upsert(3, id=number, item="same") for number in range(100, 200)))
    many.merge(*(upsert(4, id=number, item=f"{number}") for number in range(200, 350)))
    same, unique = sorted(many.files().by_path.values(), key=lambda file: file.rows or 0)[-2:]

    assert dictionaries([same]) == {"item"}
    assert dictionaries([same, unique]) == set()


def test_what_a_pace_raises_ends_the_rewrite_without_a_file(many: VectorTable) -> None:
    def stop(copied: int) -> None:
        raise InterruptedError(copied)

    files = set(Path(many.uri).iterdir())
    with pytest.raises(InterruptedError):
        file_compaction.write(many.storage, due_in(many), COLUMNS.names, COLUMNS.names, stop)
    assert set(Path(many.uri).iterdir()) == files


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
    rewrite_due(table)

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
    rewrite_due(table)
    (file,) = table.files().by_path.values()

    assert [row["at"] for row in table.rows()] == [times[0], times[2]]
    assert pq.read_schema(Path(table.uri, file.path)).field("at").type.unit == "us"
