"""Copy-on-write: data files with old rows are written again without them, and nothing else of the table changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from cdc.delta_protocol.commits import commit_path
from pipelines.sinks.delta.copy_on_write import SMALL, FileRewriter
from pipelines.sinks.delta.indexed.delta_log import LiveFile
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, gone, part, put
from tests.delta_protocol.test_table_storage import access
from tests.fixtures.s3 import S3
from tests.pipelines.sinks.added_features import commit, items_by_id
from tests.pipelines.sinks.delta.test_indexed_writer import data_files, items_in
from tests.pipelines.sinks.delta.vector_tables import (
    COLUMNS,
    OthersFirst,
    VectorTable,
    columns_of,
    delete,
    newest_version,
    source_of,
    upsert,
)


@pytest.fixture(name="two")
def _two(tmp_path: Path) -> VectorTable:
    """A table without deletion vectors that has two rows in one file."""
    table = VectorTable(str(tmp_path / "table"), properties={})
    table.merge(upsert(1, id=1, item="a"), upsert(1, 1, id=2, item="b"))
    return table


def actions_of(table: VectorTable) -> list[dict[str, Any]]:
    """Return the actions of the newest commit."""
    text = Path(table.uri, commit_path(newest_version(table.uri))).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_a_file_with_an_old_row_is_replaced_by_one_with_the_others(two: VectorTable) -> None:
    two.merge(upsert(2, id=3, item="c"))
    old, other = two.files().by_path
    two.merge(upsert(3, id=1, item="A"))
    actions = actions_of(two)

    assert items_in(two) == [(1, "A"), (2, "b"), (3, "c")]
    assert [next(iter(action)) for action in actions] == ["commitInfo", "remove", "add", "add", "txn"]
    assert (actions[1]["remove"]["path"], actions[1]["remove"]["dataChange"]) == (old, True)
    assert all(add["add"]["dataChange"] and "deletionVector" not in add["add"] for add in actions[2:4])
    assert other in two.files().by_path
    assert "deletionVectors" not in two.files().features


def test_the_bytes_of_files_that_are_written_again_are_counted(two: VectorTable) -> None:
    assert two.merge_source(source_of(COLUMNS, [upsert(2, id=3, item="c")])) == 0
    copied = two.merge_source(source_of(COLUMNS, [delete(3, id=1)]))

    assert copied == min(add["add"]["size"] for add in actions_of(two) if "add" in add)
    assert two.merge_source(source_of(COLUMNS, [delete(4, id=2), delete(4, 1, id=3)])) == 0


def test_a_file_whose_rows_are_all_old_is_not_replaced(two: VectorTable) -> None:
    two.merge(delete(2, id=1), delete(2, 1, id=2))

    assert [next(iter(action)) for action in actions_of(two)] == ["commitInfo", "remove", "txn"]
    assert two.files().by_path == {}


def test_rows_that_are_deleted_by_a_vector_stay_deleted(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"))
    table.merge(*(upsert(1, number, id=number, item="a") for number in range(4)))
    table.merge(delete(2, id=0))  # by a vector
    (file,) = table.files().by_path.values()
    assert file.vector is not None
    table.copies = True
    table.merge(upsert(3, id=1, item="A"))
    assert actions_of(table)[1]["remove"]["deletionVector"] == file.vector
    table.merge(upsert(4, id=0, item="new"))

    assert items_in(table) == [(0, "new"), (1, "A"), (2, "a"), (3, "a")]
    assert not any(file.vector for file in table.files().by_path.values())


def test_vectors_that_were_disabled_again_are_honoured_and_not_written(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"))
    table.merge(*(upsert(1, number, id=number, item="a") for number in range(4)))
    table.merge(delete(2, id=0))
    DeltaTable(table.uri).alter.set_table_properties({"delta.enableDeletionVectors": "false"})
    table.merge(delete(3, id=1))

    assert items_in(table) == [(2, "a"), (3, "a")]
    assert not any(file.vector for file in table.files().by_path.values())


def with_others(table: VectorTable, *others: Callable[[], object]) -> VectorTable:
    """Return the table as a process has it that commits after these other clients."""
    table.close()
    waiting = list(others)
    return VectorTable(table.uri, storage_class=lambda root: OthersFirst(root, waiting))


def test_a_second_attempt_commits_the_files_of_the_first_one(two: VectorTable) -> None:
    table = with_others(two, lambda: commit(two.uri))
    before = data_files(two)
    table.merge_unread(upsert(2, id=1, item="A"))

    assert len(data_files(table) - before) == 2  # the new row, and the copy of the other one
    assert items_in(table) == [(1, "A"), (2, "b")]


def test_rows_that_another_client_deletes_between_plan_and_commit_do_not_come_back(two: VectorTable) -> None:
    two.merge(upsert(2, id=3, item="c"))
    DeltaTable(two.uri).optimize.compact()
    table = with_others(two, lambda: DeltaTable(two.uri).delete("id = 2"))
    table.merge_unread(upsert(3, id=1, item="A"))

    assert items_in(table) == [(1, "A"), (3, "c")]


def test_a_vacuum_between_plan_and_commit_fails_no_merge(two: VectorTable) -> None:
    def vacuum() -> None:
        DeltaTable(two.uri).delete("id = 2")
        DeltaTable(two.uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=False)

    table = with_others(two, vacuum)
    table.merge_unread(upsert(3, id=1, item="A"))

    assert items_in(table) == [(1, "A")]


def test_small_files_are_written_together_and_a_large_one_alone(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"), properties={})
    for number in range(4):
        table.merge(*(upsert(number, place, id=10 * number + place, item="a") for place in range(3)))
    files = list(table.files().by_path.values())
    files[1] = LiveFile(files[1].add | {"size": SMALL})
    written = FileRewriter(table.storage, COLUMNS.names, table.described).write(files)

    assert sorted(file.rows or 0 for file in written) == [3, 9]
    table.merge(*(upsert(9, number, id=10 * number, item="A") for number in range(4)))
    assert len(table.files().by_path) == 2
    assert len(items_in(table)) == 12


def test_files_of_a_partition_stay_in_it(tmp_path: Path) -> None:
    columns = columns_of(("id", pa.int64()), ("item", pa.string()), ("day", pa.date32()))
    table = VectorTable(str(tmp_path / "table"), columns, partition_by=("day",), properties={})
    write_deltalake(
        table.uri,
        pa.Table.from_pylist(
            [
                {"id": n, "item": "a", "day": None if n % 3 == 2 else n % 3, "_position": 1, "_ordinal": n}
                for n in range(9)
            ],
            schema=columns,
        ),
        mode="append",
    )
    table.merge(*(delete(2, n, id=n) for n in range(3)))

    found = {(row["id"], None if row["day"] is None else row["day"].toordinal()) for row in table.rows()}
    epoch = 719163
    assert found == {(n, None if n % 3 == 2 else epoch + n % 3) for n in range(3, 9)}
    assert len(table.files().by_path) == 3


def test_a_copied_file_has_statistics(two: VectorTable) -> None:
    two.merge(delete(2, id=1))
    (file,) = two.files().by_path.values()

    assert (file.rows, file.stats["minValues"]["id"], file.stats["maxValues"]["item"]) == (1, 2, "b")


def test_a_merge_reads_no_column_of_a_file_without_old_rows(two: VectorTable) -> None:
    """A file that is gone tells who reads it: its keys are in the index."""
    two.merge(upsert(2, id=3, item="c"))
    _, other = two.files().by_path
    Path(two.uri, other).rename(Path(two.uri, other + ".away"))
    two.merge(upsert(3, id=1, item="A"))
    Path(two.uri, other + ".away").rename(Path(two.uri, other))

    assert items_in(two) == [(1, "A"), (2, "b"), (3, "c")]


def test_lists_are_keys(tmp_path: Path) -> None:
    columns = columns_of(("tags", pa.list_(pa.float64())), ("item", pa.string()))
    table = VectorTable(str(tmp_path / "table"), columns, ("tags",), properties={})
    keys: list[list[float | None]] = [[], [0.0], [0.0, 0.0], [None], [None, 1.5], [float("nan")], [float("inf")]]
    table.merge(*(upsert(1, number, tags=key, item=str(number)) for number, key in enumerate(keys)))
    table.merge(
        delete(2, tags=[-0.0]), *(upsert(2, n, tags=keys[n], item="new") for n in (0, 3, 5)), delete(2, 9, tags=[1])
    )

    assert sorted((row["item"], len(row["tags"])) for row in table.rows()) == [
        ("2", 2), ("4", 2), ("6", 1), ("new", 0), ("new", 1), ("new", 1),
    ]  # fmt: skip


def test_an_append_only_table_takes_new_rows_and_loses_none(two: VectorTable) -> None:
    DeltaTable(two.uri).alter.set_table_properties({"delta.appendOnly": "true"})
    two.merge(upsert(2, id=3, item="c"), delete(2, 1, id=7))
    before = data_files(two)
    with pytest.raises(DeltaError, match="append-only"):
        two.merge(upsert(3, id=1, item="A"))

    assert (items_in(two), data_files(two)) == ([(1, "a"), (2, "b"), (3, "c")], before)


def test_files_in_a_bucket_are_written_again(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    access(monkeypatch, s3.port)
    sink = DeltaSink(DeltaSettings("lake", f"{s3.root()}/{{schema}}/{{table}}", Writer.COPY_ON_WRITE))
    sink.open("log-1")
    sink.apply(batch([put(key, f"{key}", 10, ordinal=key) for key in range(5)], 0, 20))
    sink.apply(batch([put(1, "A", 30), gone(2, 31), part(3, 32, {2: "C"})], 20, 40))
    record = sink.apply(batch([put(1, "B", 50), put(2, "again", 51)], 40, 60))
    sink.close()

    assert items_by_id(record.target) == {0: "0", 1: "B", 2: "again", 3: "C", 4: "4"}
    assert "deletionVectors" not in (DeltaTable(record.target).protocol().writer_features or ())
