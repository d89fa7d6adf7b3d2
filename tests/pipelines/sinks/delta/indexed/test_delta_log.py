"""Live files: what delta-rs says of a table, at any version, from checkpoints of any classic form and from commits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from hypothesis import example, given
from hypothesis import strategies as st
from pyroaring import BitMap
from pyspark.sql import SparkSession

from cdc.boot_clock import SECOND
from cdc.delta_protocol.actions import Action
from cdc.delta_protocol.commits import commit_path
from cdc.delta_protocol.deletion_vectors import DamagedVector
from cdc.delta_protocol.table_storage import LocalStorage
from pipelines.sinks.delta.indexed.delta_log import (
    RECENT,
    LiveFile,
    LiveFiles,
    LogNotReadable,
    checkpoint_path,
    vector_paths,
)
from tests.fixtures.examples import examples
from tests.pipelines.sinks.added_features import commit
from tests.pipelines.sinks.delta.vector_tables import APP, VectorTable, columns_of, delete, rows_in, upsert

PARTS = ["a", "b c", "ü/%=1", None]
COLUMNS = columns_of(("id", pa.int64()), ("item", pa.string()), ("part", pa.string()))


class ChangingTable:
    """A partitioned table that delta-rs and the indexed writer change; each method is a change."""

    def __init__(self, folder: str) -> None:
        self.mine = VectorTable(f"{folder}/a table", COLUMNS, partition_by=("part",))
        self.uri, self.rows = self.mine.uri, 0

    @property
    def table(self) -> DeltaTable:
        """The table in its newest version, as another client opens it."""
        return DeltaTable(self.uri)

    def append(self, choice: int) -> None:
        """Append three rows."""
        ids = range(self.rows, self.rows + 3)
        self.rows += 3
        parts = pa.array([PARTS[(choice + number) % len(PARTS)] for number in range(3)], pa.string())
        write_deltalake(
            self.uri, pa.table({"id": ids, "item": ["x"] * 3, "part": parts}), mode="append", schema_mode="merge"
        )

    def upsert(self, choice: int) -> None:
        """Replace or insert one row with the indexed writer."""
        self.mine.merge(upsert(choice, id=choice, item="mine", part=PARTS[choice % len(PARTS)]))

    def mark(self, choice: int) -> None:
        """Delete two rows with the indexed writer."""
        self.mine.merge(delete(choice, id=choice), delete(choice, id=choice + 3))

    def delete(self, choice: int) -> None:
        """Delete a row."""
        self.table.delete(f"id = {choice}")

    def update(self, choice: int) -> None:
        """Change a row."""
        self.table.update(updates={"item": "'new'"}, predicate=f"id = {choice}")

    def merge(self, choice: int) -> None:
        """Change a row and insert another one."""
        source = pa.table({"id": [choice, choice + 100], "item": ["merged"] * 2, "part": ["a"] * 2})
        merger = self.table.merge(source, "s.id = t.id", source_alias="s", target_alias="t")
        merger.when_matched_update_all().when_not_matched_insert_all().execute()

    def compact(self, _: int) -> None:
        """Merge small files."""
        self.table.optimize.compact()

    def checkpoint(self, _: int) -> None:
        """Write a checkpoint."""
        self.table.create_checkpoint()

    def own_checkpoint(self, _: int) -> None:
        """Write a checkpoint as the indexed writer does."""
        LiveFiles.read(LocalStorage(Path(self.uri))).write_checkpoint()

    def restore(self, choice: int) -> None:
        """Go back to an older version."""
        self.table.restore(choice % self.table.version())

    def overwrite(self, choice: int) -> None:
        """Replace all rows and all columns but those that the indexed writer needs."""
        more = {} if choice % 2 else {"more": [1.5]}
        place = {"_position": pa.array([None], pa.int64()), "_ordinal": pa.array([None], pa.int64())}
        rows = pa.table({"id": [choice], "item": ["o"], "part": ["a"], **place, **more})
        write_deltalake(self.uri, rows, mode="overwrite", schema_mode="overwrite", partition_by=["part"])

    def property(self, choice: int) -> None:
        """Change a property."""
        self.table.alter.set_table_properties({"delta.logRetentionDuration": f"interval {choice + 1} days"})

    def feature(self, _: int) -> None:
        """Add a table feature."""
        self.table.alter.add_feature([TableFeatures.CheckConstraints], allow_protocol_versions_increase=True)


CHANGES = [name for name, found in vars(ChangingTable).items() if callable(found) and not name.startswith("_")]


def as_delta_rs_says(uri: str, version: int | None = None) -> tuple[Any, ...]:
    """Return the newest version, its files and its properties, as delta-rs reads them."""
    table = DeltaTable(uri, version=version)
    files = pa.table(table.get_add_actions(flatten=True)).select(["path", "size_bytes", "num_records"]).to_pylist()
    metadata = table.metadata()
    return (
        table.version(),
        sorted(tuple(file.values()) for file in files),
        pa.table(table.scan()).num_rows,
        (str(metadata.id), metadata.configuration, tuple(metadata.partition_columns)),
        frozenset([*(table.protocol().reader_features or ()), *(table.protocol().writer_features or ())]),
    )


def as_read(files: LiveFiles) -> tuple[Any, ...]:
    """Return the same of live files."""
    found = files.by_path.values()
    assert all(len(file.deleted) == (file.vector or {"cardinality": 0})["cardinality"] for file in found)
    return (
        files.version,
        sorted((file.add["path"], file.add["size"], file.rows) for file in found),
        sum((file.rows or 0) - len(file.deleted) for file in found),
        (files.metadata["id"], files.configuration, files.partition_columns),
        files.features,
    )


def actions_of(files: LiveFiles) -> dict[str, tuple[dict[str, Any], BitMap]]:
    """Return path → the fields of the `add` action that are not null, and the deleted rows."""
    return {
        path: ({name: value for name, value in file.add.items() if value is not None}, file.deleted)
        for path, file in files.by_path.items()
    }


@examples(4)
@example([(name, 2) for name in CHANGES])
@given(st.lists(st.tuples(st.sampled_from(CHANGES), st.integers(0, 9)), min_size=1, max_size=9))
def test_any_history_is_read_as_delta_rs_reads_it(changes: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder:
        changing = ChangingTable(folder)
        storage = LocalStorage(Path(changing.uri))
        stepwise, said = LiveFiles.read(storage), dict[int, tuple[Any, ...]]()
        for name, choice in [("append", 0), *changes]:
            getattr(changing, name)(choice)
            stepwise.advance()
            said[stepwise.version] = as_delta_rs_says(changing.uri)
            assert as_read(stepwise) == said[stepwise.version]
        for file in stepwise.by_path.values():
            assert Path(changing.uri, file.path).stat().st_size == file.add["size"]
        for version in range(stepwise.version + 1):
            of_delta_rs = said.get(version) or as_delta_rs_says(changing.uri, version)
            assert as_read(LiveFiles.read(storage, version)) == of_delta_rs
        assert actions_of(LiveFiles.read(storage)) == actions_of(stepwise)
        changing.mine.close()


@pytest.fixture(name="marked")
def _marked(tmp_path: Path) -> VectorTable:
    """A table of two partitions with deletion vectors and a checkpoint in version 3, without the commits before it."""
    found = VectorTable(str(tmp_path / "table"), COLUMNS, partition_by=("part",))
    found.merge(*(upsert(1, number, id=number, item="x", part=PARTS[number % 2]) for number in range(8)))
    found.merge(delete(2, id=0), delete(2, id=1))
    found.merge(delete(3, id=2))
    DeltaTable(found.uri).create_checkpoint()
    for version in range(3):
        Path(found.uri, commit_path(version)).unlink()
    found.merge(upsert(4, id=3, item="later", part="b c"))
    return found


def checkpoints_of(table: VectorTable) -> list[Path]:
    """Return the files of the checkpoint."""
    return sorted(Path(table.uri, "_delta_log").glob("*.checkpoint*"))


def hint_of(table: VectorTable) -> Path:
    """Return the file that names the last checkpoint."""
    return Path(table.uri, "_delta_log", "_last_checkpoint")


def split_checkpoint(table: VectorTable, parts: int) -> list[Path]:
    """Replace the checkpoint by one of several parts."""
    (single,) = checkpoints_of(table)
    rows = pq.read_table(single)
    single.unlink()
    written = []
    for number in range(parts):
        name = single.name.replace(".parquet", f".{number + 1:010d}.{parts:010d}.parquet")
        pq.write_table(rows.take(list(range(number, rows.num_rows, parts))), single.with_name(name))
        written.append(single.with_name(name))
    hint_of(table).write_text(json.dumps(json.loads(hint_of(table).read_text()) | {"parts": parts}))
    return written


def test_a_checkpoint_and_the_commits_after_it_are_read(marked: VectorTable) -> None:
    assert as_read(marked.files()) == as_delta_rs_says(marked.uri)
    found = [(file.add["partitionValues"]["part"], list(file.deleted)) for file in marked.files().by_path.values()]
    assert sorted(found) == [("a", [0, 1]), ("b c", []), ("b c", [0, 1])]


@pytest.mark.parametrize("hint", [True, False])
def test_a_checkpoint_of_several_parts_is_read(marked: VectorTable, hint: bool) -> None:
    before = as_read(marked.files())
    split_checkpoint(marked, 3)
    if not hint:
        hint_of(marked).unlink()

    assert as_read(marked.files()) == before == as_delta_rs_says(marked.uri)


@pytest.mark.parametrize("part", range(3))
def test_a_checkpoint_whose_part_is_missing_is_not_read(marked: VectorTable, part: int) -> None:
    split_checkpoint(marked, 3)[part].unlink()
    with pytest.raises(LogNotReadable, match="nor a complete set of parts"):
        marked.files()


@pytest.mark.parametrize("text", ["", "{", "{}", '{"version": "x"}'])
def test_without_a_readable_hint_the_newest_checkpoint_is_found(marked: VectorTable, text: str) -> None:
    hint_of(marked).write_text(text)

    assert as_read(marked.files()) == as_delta_rs_says(marked.uri)


def test_a_hint_of_a_checkpoint_that_is_not_there_raises_and_nothing_is_guessed(marked: VectorTable) -> None:
    hint_of(marked).write_text(json.dumps({"version": 4, "size": 1}))
    with pytest.raises(LogNotReadable):
        marked.files()


def add_sidecars(checkpoint: Path, rows: int) -> None:
    """Give a checkpoint a column of sidecar files, of which some rows name one."""
    table = pq.read_table(checkpoint)
    kind = pa.struct([("path", pa.string()), ("sizeInBytes", pa.int64()), ("modificationTime", pa.int64())])
    named = [{"path": "a.parquet", "sizeInBytes": 1, "modificationTime": 0}] * rows
    column = pa.array([*named, *([None] * (table.num_rows - rows))], kind)
    without = table.drop_columns(["sidecar"]) if "sidecar" in table.column_names else table
    pq.write_table(without.append_column("sidecar", column), checkpoint)


def test_a_checkpoint_with_sidecar_files_is_not_read(marked: VectorTable) -> None:
    (checkpoint,) = checkpoints_of(marked)
    before = as_read(marked.files())
    add_sidecars(checkpoint, 0)
    assert as_read(marked.files()) == before
    add_sidecars(checkpoint, 1)
    with pytest.raises(LogNotReadable, match="sidecar"):
        marked.files()


@pytest.mark.parametrize("suffix", ["80a083e8-7026-4e79-81be-64bd76c43a11.parquet", "80a083e8-7026.json"])
def test_a_checkpoint_named_by_a_uuid_is_not_read(marked: VectorTable, suffix: str) -> None:
    (checkpoint,) = checkpoints_of(marked)
    checkpoint.rename(checkpoint.with_name(checkpoint.name.replace("checkpoint.parquet", f"checkpoint.{suffix}")))
    with pytest.raises(LogNotReadable, match="nor a complete set of parts"):
        marked.files()


def test_statistics_may_be_missing(marked: VectorTable) -> None:
    (checkpoint,) = checkpoints_of(marked)
    rows = pq.read_table(checkpoint)
    adds = rows["add"].combine_chunks()
    fields = [field for field in adds.type if field.name != "stats"]
    bare = pa.StructArray.from_arrays([adds.field(field.name) for field in fields], fields=fields, mask=adds.is_null())
    pq.write_table(rows.set_column(rows.column_names.index("add"), "add", bare), checkpoint)
    files = [file for file in marked.files().by_path.values() if file.stats == {}]

    assert [(file.rows, file.greatest("_position")) for file in files] == [(None, None)] * len(files) != []


def test_a_missing_commit_is_noticed(marked: VectorTable) -> None:
    hint_of(marked).unlink()
    checkpoints_of(marked)[0].unlink()
    with pytest.raises(LogNotReadable, match="commits are missing"):
        marked.files()


@pytest.mark.parametrize("version", [0, 2, 9])
def test_a_version_that_is_not_in_the_log_is_not_read(marked: VectorTable, version: int) -> None:
    assert marked.files().version == 4
    with pytest.raises(LogNotReadable):
        LiveFiles.read(marked.storage, version)


def test_a_folder_without_a_table_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(LogNotReadable):
        LiveFiles.read(LocalStorage(tmp_path))


@pytest.mark.parametrize("path", ["s3://bucket/a.parquet", "file:///tmp/a.parquet", "/tmp/a.parquet"])
def test_a_data_file_outside_of_the_table_is_not_read(marked: VectorTable, path: str) -> None:
    files = marked.files()
    add = {"path": path, "partitionValues": {}, "size": 1, "modificationTime": 0, "dataChange": True}
    commit(marked.uri, {"add": add})
    for read in (marked.files, files.advance):
        with pytest.raises(LogNotReadable, match="outside"):
            read()


def test_a_file_may_be_added_again_before_it_is_removed_in_one_commit(marked: VectorTable) -> None:
    files = marked.files()
    file = next(found for found in files.by_path.values() if found.vector is not None)
    bare = {name: value for name, value in file.add.items() if name != "deletionVector"}
    commit(marked.uri, {"add": bare}, file.remove())
    files.advance()

    assert (files.by_path[file.add["path"]].vector, len(files.by_path[file.add["path"]].deleted)) == (None, 0)
    assert as_read(files) == as_read(marked.files()) == as_delta_rs_says(marked.uri)


def test_a_missing_vector_raises_and_is_read_once_it_is_there_again(marked: VectorTable) -> None:
    files, before = marked.files(), marked.files()
    marked.merge(delete(5, id=4), delete(5, id=5))
    (vectors,) = vector_paths(marked.files().by_path.values()) - vector_paths(before.by_path.values())
    content = marked.storage.read(vectors)
    Path(marked.uri, vectors).unlink()
    for read in (marked.files, files.advance, files.advance):
        with pytest.raises(DamagedVector, match=vectors):
            read()
    assert as_read_paths(LiveFiles.read(marked.storage, with_vectors=False)) != []
    marked.storage.write(vectors, content)
    files.advance()

    assert as_read(files) == as_delta_rs_says(marked.uri)


def as_read_paths(files: LiveFiles) -> list[str]:
    """Return the paths of files that were read without their vectors."""
    assert all(not file.deleted for file in files.by_path.values())
    return sorted(files.by_path)


def test_an_existing_version_is_not_committed_again_and_nothing_changes(marked: VectorTable) -> None:
    files = marked.files()
    path, before = next(iter(files.by_path)), as_read(files)
    commit(marked.uri)
    log = {file.name: file.read_bytes() for file in Path(marked.uri, "_delta_log").iterdir()}
    with pytest.raises(FileExistsError):
        files.commit([files.by_path[path].remove()], [path])

    assert as_read(files) == before
    assert {file.name: file.read_bytes() for file in Path(marked.uri, "_delta_log").iterdir()} == log


def test_a_commit_changes_what_it_says(marked: VectorTable) -> None:
    files = marked.files()
    whole = [file for file in files.by_path.values() if file.vector is None]
    gone = next(file for file in files.by_path.values() if file.vector is not None)
    new = LiveFile(whole[0].add | {"path": "%C3%BC.parquet"})
    files.commit([gone.remove(), {"add": new.add}], [gone.add["path"], new])

    assert (new.path, gone.remove()["remove"]["deletionVector"]) == ("ü.parquet", gone.vector)
    assert as_read(files) == as_read(marked.files())
    assert actions_of(files) == actions_of(marked.files())


def test_a_file_with_more_deleted_rows_has_wide_bounds_and_its_new_vector() -> None:
    stats = {"numRecords": 3, "minValues": {"n": 1}, "maxValues": {"n": 9, "m": 5}, "nullCount": {"n": 0, "m": 1}}
    file = LiveFile({"path": "a", "size": 1, "dataChange": False, "stats": json.dumps(stats)})
    vector = {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "cardinality": 1}
    less = file.without(BitMap([1]), vector)

    assert (file.greatest("n"), file.greatest("m"), file.greatest("other")) == (9, None, None)
    assert (less.rows, list(less.deleted), less.vector) == (3, [1], vector)
    assert (less.greatest("n"), less.stats["tightBounds"]) == (9, False)
    assert json.loads(less.add["stats"]) == less.stats == stats | {"tightBounds": False}
    assert (file.deleted, file.stats, less.add["dataChange"]) == (BitMap(), stats, True)
    assert vector_paths([file, less]) == {"ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"}


def test_advance_stops_at_the_wanted_version(marked: VectorTable) -> None:
    files = LiveFiles.read(marked.storage, 3)
    marked.merge(delete(6, id=6))
    files.advance(4)
    assert files.version == 4
    for upto in (5, None):
        files.advance(upto)
        assert files.version == 5

    assert len(rows_in(marked.uri)) == as_read(files)[2]


def test_transactions_are_those_of_delta_rs_also_after_a_checkpoint(marked: VectorTable) -> None:
    files = marked.files()
    known = DeltaTable(marked.uri).transaction_version(APP)
    for version in (7, 9):
        commit(marked.uri, {"txn": {"appId": "other", "version": version}})
    marked.merge(delete(6, id=6))
    files.advance()
    DeltaTable(marked.uri).create_checkpoint()
    assert known is not None
    for read in (files, marked.files(), marked.table.files):
        assert read.transactions == {APP: known + 1, "other": 9}


def checkpointed(table: VectorTable) -> list[Action]:
    """Write a checkpoint as the sink does, and return its `remove` actions."""
    table.table.read_commits()
    files = table.table.files
    files.write_checkpoint()
    path = Path(table.uri, "_delta_log", f"{files.version:020d}.checkpoint.parquet")
    return [remove for remove in pq.read_table(path)["remove"].to_pylist() if remove is not None]


@pytest.fixture(name="busy")
def _busy(tmp_path: Path) -> VectorTable:
    """A table of which one file was emptied and another one has its third vector."""
    table = VectorTable(str(tmp_path / "table"))
    table.merge(upsert(1, id=100))
    table.merge(*(upsert(1, number, id=number) for number in range(10)))
    for number in (1, 2, 3, 100):
        table.merge(delete(2 + number, id=number))
    return table


def test_a_checkpoint_has_no_removes_of_young_files(busy: VectorTable) -> None:
    rows = busy.rows()
    assert checkpointed(busy) == []
    for removed in sorted(Path(busy.uri, "_delta_log").glob("*.json"))[:-1]:
        removed.unlink()  # from now on the checkpoint is read
    assert busy.rows() == rows
    found = busy.files()
    assert {path: (file.add, file.deleted) for path, file in found.by_path.items()} == {
        path: (file.add, file.deleted) for path, file in busy.table.files.by_path.items()
    }
    busy.merge(upsert(9, id=2, item="back"))
    assert len(busy.rows()) == len(rows) + 1


def test_a_checkpoint_that_another_client_may_be_reading_is_not_replaced(busy: VectorTable) -> None:
    files = busy.table.files
    DeltaTable(busy.uri).create_checkpoint()
    path = Path(busy.uri, checkpoint_path(files.version))
    before = path.stat()
    assert len(checkpointed(busy)) == 4
    assert (path.stat().st_ino, path.stat().st_size) == (before.st_ino, before.st_size)


def test_a_checkpoint_follows_an_earlier_one(busy: VectorTable) -> None:
    checkpointed(busy)
    busy.merge(upsert(9, id=2, item="back"))
    checkpointed(busy)
    for removed in Path(busy.uri, "_delta_log").glob("*.json"):
        removed.unlink()
    assert busy.files().transactions == busy.table.files.transactions
    assert rows_in(busy.uri) == busy.rows()
    assert as_read(busy.files()) == as_read(busy.table.files)


@pytest.mark.usefixtures("with_delta")
def test_a_checkpoint_follows_one_of_spark(busy: VectorTable, spark: SparkSession) -> None:
    DeltaTable(busy.uri).alter.set_table_properties({"delta.checkpointInterval": "1"})
    spark.sql(f"DELETE FROM delta.`{busy.uri}` WHERE id = 5")
    earlier = checkpoints_of(busy)
    assert "Spark" in DeltaTable(busy.uri).history(1)[0]["engineInfo"]
    assert earlier[-1].name == Path(checkpoint_path(DeltaTable(busy.uri).version())).name
    busy.merge(upsert(50, id=2, item="back"))
    checkpointed(busy)
    rows = busy.rows()
    for removed in (*Path(busy.uri, "_delta_log").glob("*.json"), *earlier):
        removed.unlink()
    assert rows_in(busy.uri) == rows
    assert as_read(busy.files()) == as_read(busy.table.files)
    assert DeltaTable(busy.uri).version() == busy.table.files.version


def test_a_checkpoint_keeps_the_removes_of_old_files(busy: VectorTable) -> None:
    busy.reopen()  # the process that wrote the vectors is gone
    removes = checkpointed(busy)
    assert sorted(remove["deletionVector"] is None for remove in removes) == [False, False, True]
    for number in (4, 5):
        busy.merge(delete(20 + number, id=number))
    assert len(checkpointed(busy)) == len(removes) + 1  # the vector of the process that is gone was replaced


def test_a_file_is_young_for_an_hour(busy: VectorTable) -> None:
    written = busy.table.files._written
    for path, at in written.items():
        written[path] = replace(at, up_us=at.up_us - RECENT * SECOND)

    assert len(checkpointed(busy)) == 3  # not the first state of the file that is still there
    assert busy.table.files._written == {}


@pytest.mark.parametrize("jump", [-RECENT * 24, RECENT * 24])
def test_a_jump_of_the_clock_changes_no_age(busy: VectorTable, jump: int) -> None:
    written = busy.table.files._written
    for path, at in written.items():
        written[path] = replace(at, clock_us=at.clock_us + jump * SECOND)

    assert checkpointed(busy) == []


def test_vectors_that_a_later_commit_replaced_are_not_read(busy: VectorTable) -> None:
    rows, needed = busy.rows(), vector_paths(busy.files().by_path.values())
    for path in Path(busy.uri, "_vectors").iterdir():
        if f"_vectors/{path.name}" not in needed:
            path.unlink()  # as a VACUUM does

    assert [len(file.deleted) for file in busy.files().by_path.values()] == [3]
    busy.reopen()
    busy.merge(upsert(9, id=2, item="back"))
    assert len(busy.rows()) == len(rows) + 1


def partitioned(folder: Path) -> LiveFiles:
    return LiveFiles(LocalStorage(folder), 0, {}, {"partitionColumns": ["day"]}, {})


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> LiveFile:
    """A file of ten rows in row groups of three."""
    rows = pa.table({"id": range(10), "item": [f"item {number}" for number in range(10)]})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=3)
    return LiveFile({"path": "a.parquet", "partitionValues": {"day": "2026-01-31"}})


@pytest.mark.parametrize("numbers", [[], [0], [9], [2, 3], [1, 4, 8], [*range(10)], [8, 1, 8]])
def test_the_wanted_rows_come_in_their_order(tmp_path: Path, file: LiveFile, numbers: list[int]) -> None:
    found = partitioned(tmp_path).read_rows(file, ["item", "id"], np.array(numbers, np.int64))

    assert found.to_pydict() == {"item": [f"item {number}" for number in numbers], "id": numbers}


def test_without_numbers_all_rows_are_read(tmp_path: Path, file: LiveFile) -> None:
    assert partitioned(tmp_path).read_rows(file, ["id"])["id"].to_pylist() == [*range(10)]


def test_a_column_that_is_not_in_the_file_has_the_value_of_its_partition_or_null(
    tmp_path: Path, file: LiveFile
) -> None:
    found = partitioned(tmp_path).read_rows(file, ["day", "id", "more"], np.array([4, 5]))

    assert found.to_pydict() == {"day": ["2026-01-31"] * 2, "id": [4, 5], "more": [None, None]}
