"""Indexed targets: which targets the indexed writer merges into, with an index that outlives the process."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
from structlog.testing import capture_logs

from cdc.delta_protocol.table_storage import LocalStorage
from cdc.errors import SinkUnavailable, TargetUnusable
from pipelines.sinks.contract import TableRecord
from pipelines.sinks.delta.current_version import REOPEN_AFTER
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY, data_paths_of
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.indexed.delta_log import LiveFiles, vector_paths
from pipelines.sinks.delta.indexed_writer import Indexing
from pipelines.sinks.delta.merge_source import source_rows
from pipelines.sinks.delta.open_indexed_tables import UNUSED_FOR, IndexedTargets
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_columns import RowShape
from pipelines.sinks.delta.target_layout import DELETION_VECTORS, NewTarget, TargetLayout
from pipelines.types.families import TypePolicy
from tests.contracts.folded import ID, ITEM, ORDERS, PRICE, Row, batch, column, folded, gone, put
from tests.pipelines.sinks.added_features import add_features, items_by_id

SHAPE = RowShape(ORDERS, TypePolicy.EXACT)
ON_DISK = 8
"""Entries from which a run is a file: few, so that an index is saved when it is closed."""


@dataclass
class Opened:
    """A target, and the indexed targets of the sink that fills it."""

    target: DeltaTarget
    indexed: IndexedTargets

    def merge(self, upto: int, *rows: Row) -> dict[int, str]:
        """Merge rows as a sink does, and return item by id as delta-rs reads them."""
        self.merge_unread(upto, *rows)
        return items_by_id(self.target.uri)

    def merge_unread(self, upto: int, *rows: Row) -> None:
        """Merge rows as a sink does."""
        self.target.refresh()
        assert self.indexed.can_merge(self.target, SHAPE.key), self.indexed.refused
        source = source_rows(folded(list(rows)), SHAPE)
        self.indexed.merge(self.target, source, SHAPE.key, TxnMarker(self.target.app_id, upto))


def create(uri: str, *, has_vectors: bool = True) -> DeltaTarget:
    """Create an empty target."""
    return DeltaTarget.create(uri, "log-1", NewTarget(ORDERS, SHAPE.columns, TargetLayout(has_vectors=has_vectors)))


@pytest.fixture(name="opened")
def _opened(tmp_path: Path) -> Opened:
    return Opened(
        create(str(tmp_path / "target")), IndexedTargets(str(tmp_path / "indexes"), Indexing(on_disk=ON_DISK))
    )


def folders_of(opened: Opened) -> list[Path]:
    """Return the folders of indexes."""
    folder = opened.indexed._folder
    assert folder is not None
    return sorted(folder.iterdir())


def test_a_merge_records_its_position_and_what_it_changed(opened: Opened) -> None:
    assert opened.merge(20, put(1, "a", 10), put(2, "b", 11)) == {1: "a", 2: "b"}
    assert opened.merge(40, put(1, "A", 30), gone(2, 31), put(3, "c", 32)) == {1: "A", 3: "c"}
    other = DeltaTarget.open(opened.target.uri)
    assert other is not None

    assert (opened.target.applied, other.applied, opened.target.version) == (40, 40, other.version)
    assert opened.target.files() == other.files()


def test_changes_by_other_clients_are_read_before_a_merge(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11), put(3, "c", 12))
    DeltaTable(opened.target.uri).delete("id = 2")
    write_deltalake(opened.target.uri, pa.table({"id": [4], "item": ["d"]}), mode="append", schema_mode="merge")
    DeltaTable(opened.target.uri).optimize.compact()

    assert opened.merge(40, put(2, "B", 30), put(4, "D", 31)) == {1: "a", 2: "B", 3: "c", 4: "D"}


def test_a_checkpoint_is_written_now_and_then(opened: Opened) -> None:
    expected = dict[int, str]()
    for number in range(CHECKPOINT_EVERY + 1):
        expected[number % 3] = str(number)
        opened.merge_unread(20 * number + 20, put(number % 3, str(number), 20 * number + 10))
        if number % 10 == 0:
            assert items_by_id(opened.target.uri) == expected
    found = [path.name for path in Path(opened.target.uri, "_delta_log").glob("*.checkpoint.parquet")]

    assert found == [f"{CHECKPOINT_EVERY:020d}.checkpoint.parquet"]


def test_a_target_gets_vectors_as_soon_as_they_are_enabled(tmp_path: Path) -> None:
    opened = Opened(create(str(tmp_path / "target"), has_vectors=False), IndexedTargets(None))
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    assert opened.merge(40, put(1, "A", 30)) == {1: "A", 2: "b"}
    assert "deletionVectors" not in (DeltaTable(opened.target.uri).protocol().writer_features or ())
    DeltaTable(opened.target.uri).alter.set_table_properties({DELETION_VECTORS: "true"})
    opened.target.refresh()
    opened.merge(60, put(3, "c", 50), put(4, "d", 51))
    opened.merge(80, put(3, "C", 70))

    (table,) = opened.indexed.opened(opened.target)
    assert [len(file.deleted) for file in table.files.by_path.values() if file.vector] == [1]


def test_why_a_target_is_refused_is_logged_once_and_forgotten_with_the_reason(tmp_path: Path) -> None:
    target, indexed = create(str(tmp_path / "target")), IndexedTargets(None)
    add_features(target.uri, ["deletionVectors", "columnMapping"])
    target.refresh()
    reason = "the table has unsupported features columnMapping"
    with capture_logs() as logs:
        assert [indexed.can_merge(target, SHAPE.key) for _ in range(3)] == [False] * 3
    assert [(entry["target"], entry["reason"]) for entry in logs] == [(target.uri, reason)]
    assert indexed.refused == {target.uri: reason}
    add_features(target.uri, ["deletionVectors"])
    target.refresh()

    assert indexed.can_merge(target, SHAPE.key)
    assert indexed.refused == {}


def test_a_target_that_another_client_changes_is_refused_from_then_on(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    add_features(opened.target.uri, ["deletionVectors", "columnMapping"])
    opened.target.refresh()

    assert not opened.indexed.can_merge(opened.target, SHAPE.key)
    assert opened.indexed.refused == {opened.target.uri: "the table has unsupported features columnMapping"}


def test_a_target_may_have_a_file_url(tmp_path: Path) -> None:
    create(str(tmp_path / "target"))
    target = DeltaTarget.open(f"file://{tmp_path}/target")
    assert target is not None
    opened = Opened(target, IndexedTargets(str(tmp_path / "indexes")))
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))

    assert opened.merge(40, put(1, "A", 30), gone(2, 31)) == {1: "A"}


def test_a_log_that_cannot_be_read_is_refused_while_that_is_so(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    hint = Path(opened.target.uri, "_delta_log", "_last_checkpoint")
    hint.write_text('{"version": 0, "size": 1}')
    again = Opened(opened.target, IndexedTargets(None))
    assert not again.indexed.can_merge(opened.target, SHAPE.key)
    assert again.indexed.refused == {
        opened.target.uri: "a checkpoint is neither a single Parquet file nor a complete set of parts"
    }
    hint.unlink()

    assert again.merge(40, put(1, "A", 30)) == {1: "A"}


def test_a_damaged_vector_makes_the_target_unusable(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    opened.merge(40, gone(1, 30))
    files = LiveFiles.read(LocalStorage(Path(opened.target.uri)))
    (path,) = vector_paths(files.by_path.values())
    Path(opened.target.uri, path).write_bytes(b"damaged")
    with pytest.raises(TargetUnusable, match=path):
        IndexedTargets(None).can_merge(opened.target, SHAPE.key)


def test_a_missing_data_file_makes_the_target_unusable_and_another_error_is_tried_again(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    (file,) = Path(opened.target.uri).glob("*.parquet")
    file.rename(file.with_suffix(".moved"))
    without_index = Opened(opened.target, IndexedTargets(None))
    with pytest.raises(TargetUnusable, match=file.name):
        without_index.merge(40, put(1, "A", 30))
    file.mkdir()
    with pytest.raises(SinkUnavailable, match=file.name):
        without_index.merge(40, put(1, "A", 30))
    file.rmdir()
    file.with_suffix(".moved").rename(file)

    assert without_index.merge(40, put(1, "A", 30)) == {1: "A"}


def test_a_target_that_was_created_again_has_none_of_its_earlier_rows(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    for _ in range(2):
        shutil.rmtree(opened.target.uri)
        opened.target = create(opened.target.uri)
        assert opened.merge(20, put(1, "new", 10)) == {1: "new"}
        assert opened.merge(40, gone(1, 30), put(2, "again", 31)) == {2: "again"}
    opened.indexed.close()
    shutil.rmtree(opened.target.uri)
    reopened = Opened(create(opened.target.uri), opened.indexed)

    assert reopened.merge(20, put(2, "b", 10)) == {2: "b"}


def test_a_target_whose_key_changes_gets_another_index(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    assert opened.indexed.can_merge(opened.target, ("item",))
    source = source_rows(folded([put(7, "a", 30)]), SHAPE)
    with pytest.raises(CommitFailedError, match="between the choice of the writer and the merge"):
        opened.indexed.merge(opened.target, source, SHAPE.key, TxnMarker(opened.target.app_id, 40))
    opened.indexed.merge(opened.target, source, ("item",), TxnMarker(opened.target.app_id, 40))

    assert items_by_id(opened.target.uri) == {2: "b", 7: "a"}
    opened.indexed.close()
    assert len(folders_of(opened)) == 2
    assert opened.merge(60, put(7, "A", 50)) == {2: "b", 7: "A"}


def test_what_changes_between_the_choice_of_the_writer_and_the_merge_counts(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    source = source_rows(folded([put(2, "B", 30), put(3, "c", 31)]), SHAPE)
    assert opened.indexed.can_merge(opened.target, SHAPE.key)
    DeltaTable(opened.target.uri).delete("id < 3")
    opened.target.refresh()
    opened.indexed.merge(opened.target, source, SHAPE.key, TxnMarker(opened.target.app_id, 40))
    assert items_by_id(opened.target.uri) == {2: "B", 3: "c"}
    assert opened.indexed.can_merge(opened.target, SHAPE.key)
    add_features(opened.target.uri, ["deletionVectors", "columnMapping"])
    opened.target.refresh()
    with pytest.raises(CommitFailedError, match="between the choice of the writer and the merge"):
        opened.indexed.merge(opened.target, source, SHAPE.key, TxnMarker(opened.target.app_id, 60))

    assert opened.target.applied == 40


def test_an_index_outlives_the_process(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    opened.indexed.close()
    kept = list(Path(opened.target.uri).glob("*.parquet"))
    contents = {path: path.read_bytes() for path in kept}
    again = Opened(opened.target, IndexedTargets(str(opened.indexed._folder), Indexing(on_disk=ON_DISK)))
    assert again.indexed.can_merge(again.target, SHAPE.key)
    for path in kept:  # the index has the keys, so nothing reads them from the data files
        path.write_bytes(b"")
    (table,) = again.indexed.opened(again.target)
    table.index_new_files()
    for path, content in contents.items():
        path.write_bytes(content)

    assert again.merge(40, put(1, "A", 30)) == {1: "A", 2: "b"}


def test_a_small_index_leaves_no_file_and_is_built_again(tmp_path: Path) -> None:
    opened = Opened(create(str(tmp_path / "target")), IndexedTargets(str(tmp_path / "indexes")))
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    opened.indexed.close()
    assert not (tmp_path / "indexes").exists()
    again = Opened(opened.target, IndexedTargets(str(tmp_path / "indexes")))

    assert again.merge(40, put(1, "A", 30), gone(2, 31)) == {1: "A"}


def test_two_sinks_with_one_folder_find_all_rows(opened: Opened) -> None:
    second = Opened(opened.target, IndexedTargets(str(opened.indexed._folder), Indexing(on_disk=ON_DISK)))
    opened.merge(20, put(1, "a", 10))
    second.merge(40, put(1, "A", 30), put(2, "b", 31))
    assert opened.merge(60, put(2, "B", 50)) == {1: "A", 2: "B"}
    second.indexed.close()
    opened.indexed.close()
    third = Opened(opened.target, IndexedTargets(str(opened.indexed._folder), Indexing(on_disk=ON_DISK)))

    assert third.merge(80, put(1, "c", 70), gone(2, 71)) == {1: "c"}


def test_the_index_of_a_target_that_was_not_used_for_a_week_is_removed(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    opened.indexed.close()
    (used,) = folders_of(opened)
    for name, age in (("old", UNUSED_FOR + 3_600), ("young", UNUSED_FOR - 3_600)):
        folder = used.with_name(name)
        shutil.copytree(used, folder)
        os.utime(folder, (time.time() - age,) * 2)
    again = Opened(opened.target, IndexedTargets(str(opened.indexed._folder), Indexing(on_disk=ON_DISK)))
    again.merge(40, put(1, "A", 30))
    os.utime(used, (time.time() - 2 * UNUSED_FOR,) * 2)
    again.indexed.close()

    assert [path.name for path in folders_of(opened)] == sorted([used.name, "young"])


def test_a_sink_without_a_folder_closes_and_a_missing_folder_does_not_matter(opened: Opened) -> None:
    indexed = IndexedTargets(None)
    assert Opened(opened.target, indexed).merge(20, put(1, "a", 10)) == {1: "a"}
    indexed.close()
    opened.indexed.close()

    assert Opened(opened.target, indexed).merge(40, put(1, "A", 30)) == {1: "A"}


def sink_with(folder: Path, writer: Writer) -> DeltaSink:
    """Open a sink with its targets and indexes in the folder."""
    settings = DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", writer, index_folder=f"{folder}/indexes")
    sink = DeltaSink(settings)
    sink.open("log-1")
    return sink


def operations(record: TableRecord) -> list[str]:
    """Return the engines of the merges, newest first."""
    return [
        entry.get("engineInfo", "") for entry in DeltaTable(record.target).history() if "MERGE" in entry["operation"]
    ]


@pytest.mark.parametrize("writer", [Writer.INDEXED, Writer.COPY_ON_WRITE])
def test_a_sink_merges_by_its_index(tmp_path: Path, writer: Writer) -> None:
    sink = sink_with(tmp_path, writer)
    sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    record = sink.apply(batch([put(1, "A", 30), gone(2, 31)], 20, 40))

    assert (items_by_id(record.target), sink.parts.writers.indexed.refused) == ({1: "A"}, {})
    assert operations(record) == ["cdc", "cdc"]
    assert ("deletionVectors" in (DeltaTable(record.target).protocol().writer_features or ())) == (
        writer is Writer.INDEXED
    )


def test_a_sink_merges_on_after_a_new_column(tmp_path: Path) -> None:
    sink = sink_with(tmp_path, Writer.INDEXED)
    sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    wider = replace(ORDERS, columns=(ID, ITEM, PRICE, column(4, "note")))
    row = replace(put(1, "A", 30), after={1: "1", 2: "A", 3: "1.00", 4: "n"})
    record = sink.apply(batch([row], 20, 40, wider))
    sink.close()

    assert items_by_id(record.target) == {1: "A", 2: "b"}
    assert operations(record) == ["cdc", "cdc"]


def found(opened: Opened, *ids: int, version: int | None = None) -> dict[int, str] | None:
    """Return item by id of the rows that the index finds."""
    target = opened.target
    if version is not None:
        target = DeltaTarget(target.uri, DeltaTable(target.uri, version=version))
    schema = pa.schema([SHAPE.columns.field(name) for name in ("item", "id")])
    rows = opened.indexed.find_rows(target, SHAPE.key, None, pa.table({"id": pa.array(ids, pa.int64())}), schema)
    return None if rows is None else dict(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))


def test_rows_are_found_by_their_keys(opened: Opened) -> None:
    opened.merge(20, *(put(number, str(number), number) for number in range(10)))
    opened.merge(40, put(3, "new", 30), gone(4, 31))

    assert found(opened, 3, 4, 5, 77, 5) == {3: "new", 5: "5"}
    assert found(opened) == {}
    assert found(Opened(opened.target, IndexedTargets(None)), 3, 9) == {3: "new", 9: "9"}


def test_rows_that_another_client_changed_are_found(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10), put(2, "b", 11))
    DeltaTable(opened.target.uri).update(updates={"item": "'other'"}, predicate="id = 2")
    opened.target.refresh()

    assert found(opened, 1, 2) == {1: "a", 2: "other"}


def test_rows_of_an_older_version_are_not_found_in_the_index(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    version = opened.target.version
    opened.merge(40, put(1, "b", 30))

    assert found(opened, 1, version=version) is None


def test_rows_of_a_target_without_an_index_are_not_found(tmp_path: Path) -> None:
    target = create(str(tmp_path / "target"))
    add_features(target.uri, ["deletionVectors", "columnMapping"])
    target.refresh()
    assert found(Opened(target, IndexedTargets(None)), 1) is None


def test_only_rows_whose_column_is_null_are_found_by_their_own_index(opened: Opened) -> None:
    opened.merge(20, *(put(number, None, number) for number in range(4)))
    opened.merge(40, put(2, "named", 30))
    schema, keys = pa.schema([SHAPE.columns.field("id")]), pa.table({"id": pa.array([1, 2, 9], pa.int64())})

    def ids() -> list[int]:
        opened.target.refresh()
        rows = opened.indexed.find_rows(opened.target, SHAPE.key, "item", keys, schema)
        assert rows is not None
        return sorted(rows["id"].to_pylist())

    assert ids() == [1]
    opened.merge(60, put(1, "named", 50), put(2, None, 51))
    assert ids() == [2]
    assert [table.key for table in opened.indexed.opened(opened.target)] == [SHAPE.key]
    opened.indexed.close()
    assert len(folders_of(opened)) == 2
    assert ids() == [2]


@pytest.mark.parametrize(("others", "merges"), [(False, REOPEN_AFTER + 9), (True, 21)])
def test_after_merges_the_target_is_as_if_it_were_opened_now(opened: Opened, others: bool, merges: int) -> None:
    """Alone it is opened again after some merges, with another client after each change of that client."""
    target = opened.target
    for number in range(1, merges + 1):
        opened.merge_unread(number * 20, put(number % 7, str(number), number * 20 - 5))
        if others and number % 5 == 0:
            DeltaTable(target.uri).update(updates={"item": "'other'"}, predicate="id = 3")
        if number % 9 and number not in {1, merges}:
            continue
        target.refresh()
        now = DeltaTarget(target.uri, DeltaTable(target.uri))
        assert (target.version, target.applied, target.files()) == (now.version, now.applied, now.files())
        assert opened.indexed.data_paths(target) in {None, data_paths_of(now.table)}
        assert (target.transaction("/none"), target.all_columns) == (None, now.all_columns)
        assert target.table.version() == now.version


def test_a_property_that_another_client_sets_is_read_after_own_merges(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    assert opened.target.read_property("other") is None
    DeltaTable(opened.target.uri).alter.set_table_properties({"other": "set"}, raise_if_not_exists=False)
    opened.target.refresh()
    opened.merge(40, put(1, "b", 30))

    assert opened.target.read_property("other") == "set"


def test_delta_rs_reads_no_commit_of_an_indexed_merge_before_it_is_needed(opened: Opened) -> None:
    opened.merge(20, put(1, "a", 10))
    table = opened.target.table
    for position in (40, 60):
        opened.target.refresh()
        opened.merge(position, put(1, "b", position - 10))
        assert opened.indexed.data_paths(opened.target) is not None

    assert (opened.target.version, table.version()) == (3, 1)
    assert (opened.target.table.version(), table.version()) == (3, 3)
