"""Indexed writer: what it leaves equals a model, whatever other clients and its index do between the batches."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any, Final
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.schema import Field as DeltaField
from hypothesis import given
from hypothesis import strategies as st

from cdc.delta_protocol.commits import commit_path
from cdc.delta_protocol.table_storage import LocalStorage
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, RELATION_COLUMN
from pipelines.sinks.delta.background_indexing import IndexingThread
from pipelines.sinks.delta.indexed.delta_log import ATTEMPTS, LiveFiles, MetadataChanged
from pipelines.sinks.delta.indexed_writer import refusal
from pipelines.sinks.delta.table_properties import create_table
from pipelines.sinks.delta.target_columns import OP, POSITION_KEY
from tests.fixtures.examples import examples
from tests.fixtures.waiting import until
from tests.pipelines.sinks.added_features import add_features, commit
from tests.pipelines.sinks.delta.merge_model import ModelledRows, Plain
from tests.pipelines.sinks.delta.vector_tables import (
    APP,
    COLUMNS,
    VECTORS,
    OthersFirst,
    Row,
    VectorTable,
    columns_of,
    delete,
    newest_version,
    source_of,
    upsert,
)


@dataclass(frozen=True)
class Variant:
    """A kind of table: its key columns with six keys, and its partition columns."""

    key: Mapping[str, pa.DataType]
    keys: Sequence[tuple[Any, ...]]
    partition_by: tuple[str, ...] = ()


NOON = datetime(2026, 1, 2, 12, tzinfo=ZoneInfo("UTC"))
VARIANTS: Final = {
    "integer": Variant({"id": pa.int64()}, [(number,) for number in (0, 1, -1, 7, 1 << 40, 8)]),
    "text": Variant({"id": pa.string()}, [(text,) for text in ("", "a", "A", "ü b", "a ", "longer than eight bytes")]),
    "composite": Variant(
        {"a": pa.int32(), "b": pa.string()}, [(1, "2"), (12, ""), (1, "22"), (12, "2"), (0, "a"), (0, "b")]
    ),
    "float": Variant({"id": pa.float64()}, [(value,) for value in (0.0, 0.5, -0.5, float("nan"), float("inf"), 1e300)]),
    "bytes": Variant({"id": pa.binary()}, [(value,) for value in (b"", b"\xff", b"\xff\0", b"a", b"\0", b"ab")]),
    "time": Variant(
        {"id": pa.timestamp("us", tz="UTC")}, [(NOON.replace(year=year),) for year in (1, 1969, 1970, 2026, 2027, 9999)]
    ),
    "partitioned": Variant({"id": pa.int64()}, [(number,) for number in range(6)], ("part",)),
    "partitioned by the key": Variant(
        {"day": pa.date32(), "id": pa.int32(), "ok": pa.bool_()},
        [(date(2026, 1, number % 2 + 1), number // 3, number % 2 == 0) for number in range(6)],
        ("day", "ok"),
    ),
}
MODES: Final[dict[str, dict[str, str]]] = {
    "deletion vectors": VECTORS,
    "vectors and copies in turn": VECTORS,
    "no vectors": {},
}
"""How a merge removes rows → properties of the table."""
PARTS: Final = ("a", "b c", "ü=%/", None)
MORE: Final = [("n", pa.int64()), ("item", pa.string()), ("more", pa.int64()), ("part", pa.string())]


class Modelled:
    """A table, its model, and what may happen to it; `n` is the number of the key."""

    def __init__(
        self, folder: str, variant: Variant, mode: str = "deletion vectors", *, in_background: bool = False
    ) -> None:
        """in_background: whether a thread adds all new files of others to the index, when `read_keys` lets it."""
        self.variant = variant
        self.mode = mode
        self._numbers = count()
        self._may_read = Event()
        columns = columns_of(*variant.key.items(), *MORE)
        self.mine = VectorTable(
            f"{folder}/table", columns, tuple(variant.key), variant.partition_by, properties=MODES[mode]
        )
        if in_background:
            self.mine.thread = partial(IndexingThread, at_once=0, group_rows=3, begin=self._may_read.wait)
            self.reopen(1)
        self.model = ModelledRows(self.mine.key)
        self.snapshots: dict[int, list[Plain]] = {}
        """Version → its rows, for versions that can be restored."""
        self.repeated: list[Row] = []

    @property
    def other(self) -> DeltaTable:
        """The table as another client opens it."""
        return DeltaTable(self.mine.uri)

    def _values(self, number: int) -> Plain:
        return dict(zip(self.variant.key, self.variant.keys[number], strict=True)) | {"n": number}

    def _insert(self, number: int, item: str, choice: int) -> Plain:
        more = {"more": choice, "part": PARTS[choice % len(PARTS)]}
        return {**self._values(number), "item": item, **more, POSITION_COLUMN: None, ORDINAL_COLUMN: None}

    def batch(self, found: Iterable[tuple[int, str, int, int]]) -> None:
        """Merge a batch: (number of the key, operation, position relative to the batch, ordinal) of each row."""
        base, rows = 30 + 10 * next(self._numbers), list[Row]()
        for number, op, offset, ordinal in found:
            position, part = base + offset, PARTS[(number + base // 10) % len(PARTS)]
            new = {"item": f"{base}:{number}", "more": base, "part": part} if op == "u" else {}
            rows.append((upsert if op == "u" else delete)(position, ordinal, **self._values(number), **new))
        self.merge(rows)

    def merge(self, rows: list[Row]) -> None:
        """Merge rows."""
        self.mine.copies = self.mode == "vectors and copies in turn" and not self.mine.copies
        self.mine.merge(*rows)
        self.model.merge(rows)
        self.repeated = rows

    def repeat(self, choice: int) -> None:
        """Merge the last batch again, as after a crash; perhaps the range ends later."""
        if self.repeated:
            later = [upsert(5_000 + choice, **self._insert(choice % 6, "later", choice) | {POSITION_COLUMN: 5_000})]
            numbers = {row["n"] for row in later} if choice % 2 else set()
            self.merge([*(row for row in self.repeated if row["n"] not in numbers), *(later if numbers else [])])

    def narrow(self, choice: int) -> None:
        """Merge rows without a column of the target, which keeps its values."""
        if self.model.has_duplicates():
            return  # it is not defined which of the rows the values are from
        base = 30 + 10 * next(self._numbers)
        rows = [upsert(base, **self._values(n), item="narrow", part=PARTS[n % 4]) for n in {choice % 6, choice % 4}]
        columns = [found for found in self.mine.columns if found.name != "more"]
        self.mine.table.read_commits(newest_version(self.mine.uri))
        self.mine.merge_source(source_of(pa.schema(columns), rows))
        self.model.merge(rows)

    def append(self, choice: int) -> None:
        """Append rows without positions, perhaps with keys that exist."""
        rows = [self._insert(number, "appended", choice) for number in {choice % 6, choice % 5}]
        write_deltalake(self.mine.uri, pa.Table.from_pylist(rows, schema=self.mine.columns), mode="append")
        self.model.rows += rows

    def delete(self, choice: int) -> None:
        """Delete the rows of a key."""
        self.other.delete(f"n = {choice % 6}")
        self.model.delete(lambda row: row["n"] == choice % 6)

    def update(self, choice: int) -> None:
        """Change the rows of two keys."""
        self.other.update(updates={"item": "'updated'"}, predicate=f"n < {choice % 6}")
        self.model.update(lambda row: row["n"] < choice % 6, item="updated")

    def other_merge(self, choice: int) -> None:
        """Change or insert the row of a key."""
        row = self._insert(choice % 6, "merged", choice)
        source = pa.Table.from_pylist([row], schema=self.mine.columns)
        merger = self.other.merge(source, "s.n = t.n", source_alias="s", target_alias="t")
        merger.when_matched_update({"item": "s.item"}).when_not_matched_insert_all().execute()
        if any(stored["n"] == row["n"] for stored in self.model.rows):
            self.model.update(lambda stored: stored["n"] == row["n"], item="merged")
        else:
            self.model.rows.append(row)

    def compact(self, _: int) -> None:
        """Merge small files."""
        self.other.optimize.compact()

    def checkpoint(self, _: int) -> None:
        """Write a checkpoint."""
        self.other.create_checkpoint()

    def vacuum(self, _: int) -> None:
        """Remove the files that the newest version does not need."""
        self.other.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)
        self.snapshots = {}

    def restore(self, choice: int) -> None:
        """Go back to an older version."""
        if self.snapshots:
            version = sorted(self.snapshots)[choice % len(self.snapshots)]
            if version < newest_version(self.mine.uri):
                self.other.restore(version)
                self.model.rows = list(self.snapshots[version])

    def read_keys(self, _: int) -> None:
        """Let the thread read the keys of all files that wait for it."""
        self._may_read.set()
        until(lambda: not self.mine.table.waiting_files, "the keys of all files", every=0.001)
        self._may_read.clear()

    def close(self) -> None:
        """Close the table; the thread ends the group that it works on."""
        self._may_read.set()
        self.mine.table.close()
        self._may_read.clear()

    def reopen(self, choice: int) -> None:
        """Close the table and open it again; another client may write in between."""
        self.close()
        if choice % 3 == 0:
            self.update(choice)
        if choice % 4 == 0:
            self.compact(choice)
        self.mine.table = self.mine.open()

    def lose_index(self, _: int) -> None:
        """Delete the index while the table is closed."""
        self.close()
        shutil.rmtree(self.mine.index_folder)
        self.mine.table = self.mine.open()

    def damage_index(self, choice: int) -> None:
        """Change a byte of a file of the index while the table is closed."""
        self.reopen(1)
        self.close()
        files = sorted(self.mine.index_folder.iterdir())
        file = files[choice % len(files)]
        content = bytearray(file.read_bytes() or b"0")
        content[choice * 13 % len(content)] ^= 1
        file.write_bytes(content)
        self.mine.table = self.mine.open()

    def crash(self, _: int) -> None:
        """Continue with the index as it is on the disk."""
        folder, copy = self.mine.index_folder, Path(f"{self.mine.uri}.copy")
        shutil.copytree(folder, copy)
        self.close()
        shutil.rmtree(folder)
        copy.rename(folder)
        self.mine.table = self.mine.open()

    def check(self) -> None:
        """Compare the table with its model, and remember the version."""
        names = self.mine.columns.names
        rows = sorted(repr({name: row[name] for name in names}) for row in self.mine.rows())
        assert rows == self.model.sorted(names)
        files = self.mine.files().by_path.values()
        assert all(len(file.deleted) < (file.rows or 0) for file in files)
        assert self.mode != "no vectors" or not any(file.vector for file in files)
        self.snapshots[newest_version(self.mine.uri)] = list(self.model.rows)


ROWS = st.tuples(st.integers(0, 5), st.sampled_from("uuud"), st.integers(-25, 5), st.integers(0, 1))
BATCH = st.tuples(st.just("batch"), st.lists(ROWS, min_size=1, max_size=5, unique_by=lambda row: row[0]))
BY_OTHERS = ("append", "delete", "update", "other_merge", "compact", "checkpoint", "vacuum", "restore")
TO_INDEX = ("reopen", "lose_index", "damage_index", "crash", "repeat", "narrow", "read_keys")
STEPS = st.one_of(BATCH, BATCH, st.tuples(st.sampled_from(BY_OTHERS + TO_INDEX), st.integers(0, 11)))


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
@examples(3)
@given(st.lists(STEPS, min_size=4, max_size=12), st.booleans(), st.sampled_from(sorted(MODES)))
def test_any_batches_and_changes_by_others_leave_the_rows_of_the_model(
    variant: Variant, steps: list[tuple[str, Any]], in_background: bool, mode: str
) -> None:
    with TemporaryDirectory() as folder:
        modelled = Modelled(folder, variant, mode, in_background=in_background)
        for name, choice in steps:
            getattr(modelled, name)(choice)
            modelled.check()
        modelled.batch([(number, "u", 5_000, 1) for number in range(6)])
        modelled.check()
        modelled.close()


@examples(6)
@given(
    st.lists(ROWS, min_size=1, max_size=6, unique_by=lambda row: row[0]),
    st.lists(st.tuples(st.sampled_from(BY_OTHERS[:5]), st.integers(0, 11)), min_size=1, max_size=ATTEMPTS - 1),
    st.sampled_from(sorted(MODES)),
)
def test_commits_of_others_between_plan_and_commit_count(
    rows: list[tuple[int, str, int, int]], commits: list[tuple[str, int]], mode: str
) -> None:
    with TemporaryDirectory() as folder:
        modelled, others = Modelled(folder, VARIANTS["partitioned"], mode), list[Callable[[], object]]()
        modelled.batch([(number, "u", 0, 0) for number in range(6)])
        modelled.mine.close()
        modelled.mine.storage_class = lambda root: OthersFirst(root, others)
        modelled.mine.table = modelled.mine.open()
        for name, choice in commits:
            # a change that finds no row commits nothing, so that ours is the next
            others.append(partial(getattr(modelled, name), choice))
        modelled.batch(rows)
        modelled.check()
        modelled.mine.close()


@pytest.fixture(name="two")
def _two(tmp_path: Path) -> VectorTable:
    """A table with two rows, of one file."""
    found = VectorTable(str(tmp_path / "table"))
    found.merge(upsert(1, id=1, item="a"), upsert(1, 1, id=2, item="b"))
    return found


def items_in(table: VectorTable) -> list[tuple[int, str]]:
    """Return id and item of each row."""
    return sorted((row["id"], row["item"]) for row in table.rows())


def data_files(table: VectorTable) -> set[str]:
    """Return the names of the data files on the disk."""
    return {path.name for path in Path(table.uri).glob("*.parquet")}


def with_others(table: VectorTable, *others: Callable[[], object]) -> VectorTable:
    """Return the table as a process has it that commits after these other clients."""
    table.close()
    waiting = list(others)
    return VectorTable(table.uri, storage_class=lambda root: OthersFirst(root, waiting))


OF_METADATA: Final[dict[str, Callable[[DeltaTable], None]]] = {
    "column": lambda table: table.alter.add_columns([DeltaField("more", "long")]),
    "property": lambda table: table.alter.set_table_properties({"delta.logRetentionDuration": "interval 3 days"}),
    "feature": lambda table: table.alter.add_feature(
        [TableFeatures.CheckConstraints], allow_protocol_versions_increase=True
    ),
}


@pytest.mark.parametrize("change", OF_METADATA.values(), ids=OF_METADATA)
def test_a_change_of_metadata_between_plan_and_commit_is_refused(
    two: VectorTable, change: Callable[[DeltaTable], None]
) -> None:
    table = with_others(two, lambda: change(DeltaTable(two.uri)))
    with pytest.raises(MetadataChanged):
        table.merge_unread(upsert(2, id=1, item="A"))
    assert items_in(table) == [(1, "a"), (2, "b")]
    table.merge(upsert(2, id=1, item="A"))

    assert items_in(table) == [(1, "A"), (2, "b")]


def test_a_driver_whose_range_another_driver_merged_first_merges_nothing(two: VectorTable) -> None:
    """A row without a key would otherwise be there twice."""
    table = with_others(two, lambda: VectorTable(two.uri).merge(upsert(2, id=3, item="c")))
    with pytest.raises(CommitFailedError, match="another driver"):
        table.merge_unread(upsert(2, id=3, item="c"))

    assert items_in(table) == [(1, "a"), (2, "b"), (3, "c")]


def test_a_row_that_another_driver_deleted_in_a_later_range_does_not_come_back(two: VectorTable) -> None:
    slow = VectorTable(two.uri)
    two.merge(upsert(2, id=3, item="c"))
    two.merge(delete(3, id=3))
    with pytest.raises(CommitFailedError, match="another driver"):
        slow.merge(upsert(2, id=3, item="c"))

    assert items_in(two) == [(1, "a"), (2, "b")]


def test_commits_of_others_during_every_attempt_are_refused_and_nothing_changes(two: VectorTable) -> None:
    table = with_others(two, *(lambda: commit(two.uri) for _ in range(ATTEMPTS)))
    with pytest.raises(CommitFailedError, match="each attempt"):
        table.merge_unread(upsert(2, id=1, item="A"))

    assert items_in(table) == [(1, "a"), (2, "b")]
    assert table.files().version == 1 + ATTEMPTS


def test_a_second_attempt_commits_the_files_of_the_first_one(two: VectorTable) -> None:
    table = with_others(two, lambda: commit(two.uri))
    before = data_files(two)
    table.merge_unread(upsert(2, id=1, item="A"))

    assert len(data_files(table) - before) == 1
    assert items_in(table) == [(1, "A"), (2, "b")]


def test_a_later_row_of_another_client_between_plan_and_commit_stays(two: VectorTable) -> None:
    later = source_of(COLUMNS, [upsert(9, id=1, item="later"), upsert(9, 1, id=3, item="new")]).drop_columns([OP])
    table = with_others(two, lambda: write_deltalake(two.uri, later, mode="append"))
    table.merge_unread(upsert(2, id=1, item="A"), upsert(2, 1, id=3, item="C"), delete(2, 2, id=2))

    assert items_in(table) == [(1, "later"), (3, "new")]


def test_a_file_whose_rows_are_all_deleted_leaves_the_table(two: VectorTable) -> None:
    (path,) = two.files().by_path
    two.merge(delete(2, id=1))
    assert list(two.files().by_path) == [path]
    two.merge(upsert(3, id=2, item="B"))
    text = Path(two.uri, commit_path(3)).read_text(encoding="utf-8")
    actions = [json.loads(line) for line in text.splitlines()]

    assert [next(iter(action)) for action in actions] == ["commitInfo", "remove", "add", "txn"]
    assert actions[1]["remove"]["path"] == path != actions[2]["add"]["path"]
    assert (items_in(two), len(two.files().by_path)) == ([(2, "B")], 1)


def test_a_file_without_statistics_leaves_the_table_too(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"))
    rows = source_of(COLUMNS, [upsert(1, id=1, item="a"), upsert(1, 1, id=2, item="b")]).drop_columns([OP])
    pq.write_table(rows, f"{table.uri}/bare.parquet")
    add = {"path": "bare.parquet", "size": Path(table.uri, "bare.parquet").stat().st_size, "partitionValues": {}}
    commit(table.uri, {"add": add | {"modificationTime": 0, "dataChange": True}})
    table.merge(delete(2, id=1))
    assert items_in(table) == [(2, "b")]
    table.merge(delete(2, id=2))

    assert (items_in(table), table.files().by_path) == ([], {})


def test_tables_that_share_a_target_have_the_same_keys_apart(tmp_path: Path) -> None:
    columns = columns_of(("id", pa.int64()), ("item", pa.string()), (RELATION_COLUMN, pa.int64()))
    first, second = (
        VectorTable(str(tmp_path / "table"), columns, partition_by=(RELATION_COLUMN,), relation=relation)
        for relation in (5, 50)
    )
    for table in (first, second):
        own = {RELATION_COLUMN: table.relation}
        table.merge(*(upsert(1, number, id=number, item=f"{table.relation}", **own) for number in range(3)))
    first.merge(delete(2, id=0), upsert(2, 1, id=1, item="changed", **{RELATION_COLUMN: 5}))
    second.merge(delete(2, id=2))
    second.reopen()
    second.merge(upsert(3, id=0, item="changed", **{RELATION_COLUMN: 50}))

    assert len(first.table.index.files) == len(second.table.index.files) == 2
    found = sorted((row[RELATION_COLUMN], row["id"], row["item"]) for row in first.rows())
    assert found == [(5, 1, "changed"), (5, 2, "5"), (50, 0, "changed"), (50, 1, "50")]


def test_a_row_of_a_table_without_a_key_is_found_by_its_position(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"), key=POSITION_KEY)
    table.merge(*(upsert(1, number, id=number % 2, item=f"{number}") for number in range(4)), upsert(2, id=0, item="4"))
    table.merge(delete(1, 2), upsert(3, id=0, item="5"), delete(9, 9))

    assert items_in(table) == [(0, "0"), (0, "4"), (0, "5"), (1, "1"), (1, "3")]


def test_rows_without_a_key_are_inserted_and_match_nothing(two: VectorTable) -> None:
    two.merge(upsert(2, id=None, item="none"), upsert(2, 1, id=1, item="A"))
    two.merge(delete(3, id=None), upsert(3, 1, id=None, item="another"))

    assert sorted(row["item"] for row in two.rows()) == ["A", "another", "b", "none"]


def test_an_empty_plan_commits_the_marker_alone(two: VectorTable) -> None:
    before = two.files()
    two.merge(delete(2, id=7), upsert(0, id=1, item="older"))
    after = two.files()

    assert (after.version, list(after.by_path)) == (before.version + 1, list(before.by_path))
    assert DeltaTable(two.uri).transaction_version(APP) == 2
    assert items_in(two) == [(1, "a"), (2, "b")]


def test_a_row_is_replaced_by_a_later_or_an_equal_change_and_deleted_by_a_later_one(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path / "table"))
    places = [(5, 0), (5, 1), (5, 2), (4, 9), (6, 0)]
    for number, (make, position, ordinal) in enumerate((make, *place) for make in (upsert, delete) for place in places):
        table.merge(upsert(5, 1, id=number, item="stored"))
        table.merge(make(position, ordinal, id=number, **({"item": "new"} if make is upsert else {})))

    upserted = ["stored", "new", "new", "stored", "new"]
    deleted = {5: "stored", 6: "stored", 8: "stored"}  # those of an earlier and of an equal change
    assert dict(items_in(table)) == dict(enumerate(upserted)) | deleted


def test_a_deleted_row_does_not_count_whatever_its_position(two: VectorTable) -> None:
    two.merge(delete(9, id=1))
    two.merge(upsert(0, id=1, item="again"))

    assert items_in(two) == [(1, "again"), (2, "b")]


def test_a_full_vacuum_by_another_client_keeps_the_vectors(two: VectorTable) -> None:
    two.merge(delete(2, id=1))
    DeltaTable(two.uri).vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)

    assert items_in(two) == [(2, "b")]
    assert two.files().version == DeltaTable(two.uri).version()


def test_an_index_that_was_closed_is_used_without_a_look_at_the_data_files(two: VectorTable) -> None:
    two.close()
    for path in Path(two.uri).glob("*.parquet"):
        path.write_bytes(b"unreadable")
    opened = two.open()
    opened.index_new_files()

    assert len(opened.index.files) == 1


def test_an_index_is_not_read_for_keys_beyond_the_bounds_of_all_files(two: VectorTable) -> None:
    beyond, around = (pa.table({"id": pa.array(keys, pa.int64())}) for keys in ([1_000, 2_000], [-1_000, 1_000]))
    two.table.index._runs = [None]  # type: ignore[list-item]  # an index that cannot be read

    assert two.table.find_rows(beyond, COLUMNS).num_rows == 0
    with pytest.raises(AttributeError):
        two.table.find_rows(around, COLUMNS)


def test_an_index_of_another_key_is_not_used(two: VectorTable) -> None:
    two.close()
    other = VectorTable(two.uri, key=("item",))
    assert other.table.index.files == {}
    other.merge(upsert(2, id=9, item="a"))

    assert items_in(other) == [(2, "b"), (9, "a")]


def test_commits_that_were_removed_from_the_log_are_not_needed(two: VectorTable) -> None:
    for number in range(3):
        write_deltalake(two.uri, pa.table({"id": [number + 2], "item": ["other"]}), mode="append", schema_mode="merge")
    DeltaTable(two.uri).create_checkpoint()
    for version in range(4):
        Path(two.uri, commit_path(version)).unlink()
    two.merge(upsert(2, id=2, item="B"), upsert(2, 1, id=4, item="D"))

    assert items_in(two) == [(1, "a"), (2, "B"), (3, "other"), (4, "D")]


@pytest.mark.parametrize("closed", [False, True], ids=["open meanwhile", "closed meanwhile"])
def test_rows_that_a_restore_brings_back_are_found_again(two: VectorTable, closed: bool) -> None:
    two.merge(delete(2, id=1))
    two.close()
    shutil.rmtree(two.index_folder)
    two.table = two.open()
    two.table.index_new_files()
    if closed:
        two.close()
    DeltaTable(two.uri).restore(1)
    if closed:
        two.table = two.open()
    two.merge(upsert(3, id=1, item="A"))

    assert items_in(two) == [(1, "A"), (2, "b")]


def test_a_large_file_that_a_restore_brings_back_is_indexed_again(tmp_path: Path) -> None:
    table, rows = VectorTable(str(tmp_path / "table")), 70_000
    source = pa.table(
        [np.arange(rows), pa.nulls(rows, pa.string()), np.full(rows, 1), np.zeros(rows, np.int64), ["u"] * rows],
        [*COLUMNS.names, OP],
    )
    for position in (1, 2):  # the second merge removes the first file, and the thread drops its entries
        placed = source.set_column(2, POSITION_COLUMN, pa.array(np.full(rows, position)))
        table.table.merge(placed, table.marker(), COLUMNS, [POSITION_COLUMN])
    table.table.index._end_merge()
    assert table.table.index.entries == rows
    DeltaTable(table.uri).restore(1)
    table.merge(*(upsert(3, id=number, item="new") for number in range(5)))

    items = pa.table(DeltaTable(table.uri).scan(columns=["item"]))["item"]

    assert (len(items), len(items.drop_null())) == (rows, 5)


def test_keys_in_files_of_older_spark_versions_are_found(tmp_path: Path) -> None:
    """Their timestamps are INT96: 64 bits of nanoseconds do not have the year 9999."""
    columns = columns_of(("id", pa.timestamp("us", tz="UTC")), ("item", pa.string()))
    table, keys = VectorTable(str(tmp_path / "table"), columns), [NOON.replace(year=year) for year in (1, 2026, 9999)]
    rows = source_of(columns, [upsert(1, number, id=key, item="old") for number, key in enumerate(keys)])
    pq.write_table(rows.drop_columns([OP]), f"{table.uri}/spark.parquet", use_deprecated_int96_timestamps=True)
    size = Path(table.uri, "spark.parquet").stat().st_size
    add = {"path": "spark.parquet", "size": size, "partitionValues": {}, "modificationTime": 0, "dataChange": True}
    commit(table.uri, {"add": add | {"stats": json.dumps({"numRecords": 3})}})
    table.merge(delete(2, id=keys[0]), upsert(2, 1, id=keys[2], item="new"))

    assert sorted((row["id"], row["item"]) for row in table.rows()) == [(keys[1], "old"), (keys[2], "new")]


def metadata_of(uri: str, **changed: Any) -> dict[str, Any]:
    """Return an action with the metadata of a table, some of it changed."""
    return {"metaData": LiveFiles.read(LocalStorage(Path(uri))).metadata | changed}


def refused(uri: str) -> str | None:
    """Return why the indexed writer does not write the table."""
    return refusal(LiveFiles.read(LocalStorage(Path(uri))))


PROPERTIES: Final[dict[str, dict[str, str]]] = {
    "vectors": VECTORS,
    "no vectors": {},
    "change data feed": {"delta.enableChangeDataFeed": "true"},
    "append only": {"delta.appendOnly": "true"},
    "check constraint": {"delta.constraints.positive": "id > 0"},
}


@pytest.mark.parametrize("properties", PROPERTIES.values(), ids=PROPERTIES)
def test_a_table_with_properties_that_the_writer_follows_is_not_refused(
    tmp_path: Path, properties: dict[str, str]
) -> None:
    create_table(str(tmp_path), COLUMNS, configuration=properties)
    assert refused(str(tmp_path)) is None


def test_unknown_features_are_named(two: VectorTable) -> None:
    add_features(two.uri, ["deletionVectors", "columnMapping", "timestampNtz", "checkConstraints"])
    assert refused(two.uri) == "the table has unsupported features columnMapping"


def test_what_an_older_protocol_does_not_name_as_a_feature_is_refused(tmp_path: Path) -> None:
    table = VectorTable(str(tmp_path), properties={})
    commit(table.uri, metadata_of(table.uri, configuration={"delta.columnMapping.mode": "name"}))
    assert refused(table.uri) == "table property delta.columnMapping.mode is set"
    schema = json.loads(table.files().metadata["schemaString"])
    for key, kind in (("delta.generationExpression", "generated"), ("delta.identity.start", "identity")):
        schema["fields"][0]["metadata"] = {key: "1"}
        commit(table.uri, metadata_of(table.uri, schemaString=json.dumps(schema), configuration={}))
        assert refused(table.uri) == f"the table has {kind} columns"
