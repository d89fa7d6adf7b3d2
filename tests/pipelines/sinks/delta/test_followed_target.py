"""Changed rows of a target, from its files: they are the differences of its versions, and cost no read of the rest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from cdc.config.delta_sink import SinkRule
from pipelines.sinks.delta.followed_target import MOST_ROWS, FollowedTarget
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion
from tests.contracts.folded import ORDERS, Row, batch, gone, put

KEYS = 300
Rows = dict[int, str]
"""Id → item."""


class Lake:
    """One target, and the rows that each version of it should have."""

    def __init__(self, folder: Path) -> None:
        self._sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}"))
        self._sink.open("log-1")
        self._upto = 0
        self.uri = f"{folder}/shop/orders"
        self.rows: Rows = {}

    def apply(self, *rows: Row) -> TableVersion:
        upto = self._upto + 20
        placed = [replace(row, position=upto, ordinal=number) for number, row in enumerate(rows)]
        made = self._sink.apply(batch(placed, self._upto, upto, generation=None if self._upto else 1))
        self._upto = upto
        for row in rows:
            self.rows.pop(int(row.key[0]), None)
            if row.after is not None:
                self.rows[int(row.key[0])] = row.after[2] or ""
        assert made.version is not None
        return TableVersion(made.target, made.version, made.relation)


def items(rows: pa.Table) -> Rows:
    return dict(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))


def changed(followed: FollowedTarget, before: TableVersion, after: TableVersion) -> tuple[Rows, Rows]:
    old, new = followed.changed_rows(before.version, after, "id", pa.chunked_array([range(KEYS)], pa.int64()))
    return items(old), items(new)


def expected(before: Rows, after: Rows, written: set[int]) -> tuple[Rows, Rows]:
    """The rows that were written again, with or without another value, as they were and as they are."""
    return {k: v for k, v in before.items() if k in written}, {k: v for k, v in after.items() if k in written}


@pytest.mark.parametrize("seed", range(4))
def test_they_are_the_rows_that_each_step_wrote(tmp_path: Path, seed: int) -> None:
    chance, lake = Random(seed), Lake(tmp_path)
    before = lake.apply(*(put(number, "first", 0) for number in range(KEYS)))
    followed = FollowedTarget(lake.uri)
    for step in range(12):
        known, written = dict(lake.rows), set[int]()
        for _ in range(chance.choice((1, 1, 3))):
            chosen = {chance.randrange(KEYS) for _ in range(chance.choice((1, 5, KEYS * 4)))}
            rows = [put(key, f"{step}", 0) if chance.random() < 0.7 else gone(key, 0) for key in chosen]
            after = lake.apply(*rows)
            written |= chosen
        if chance.random() < 0.3:
            DeltaTable(lake.uri).create_checkpoint()
        assert changed(followed, before, after) == expected(known, lake.rows, written)
        before = after
        if chance.random() < 0.2:  # a process that was restarted
            followed = FollowedTarget(lake.uri)


def test_a_version_can_be_read_again_after_a_later_one(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    first = lake.apply(put(1, "a", 0), put(2, "a", 0))
    second = lake.apply(put(1, "b", 0))
    third = lake.apply(put(1, "c", 0))
    followed = FollowedTarget(lake.uri)

    assert changed(followed, second, third) == ({1: "b"}, {1: "c"})
    assert changed(followed, first, second) == ({1: "a"}, {1: "b"})
    assert changed(followed, first, third) == ({1: "a"}, {1: "c"})
    assert changed(followed, third, third) == ({}, {})


def test_a_target_whose_commits_were_removed_is_read_from_its_checkpoint(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    versions = [lake.apply(put(1, item, 0)) for item in "abcdef"]
    followed = FollowedTarget(lake.uri)
    assert changed(followed, versions[0], versions[1]) == ({1: "a"}, {1: "b"})
    DeltaTable(lake.uri, version=versions[3].version).create_checkpoint()
    for commit in range(versions[3].version):
        Path(lake.uri, "_delta_log", f"{commit:020d}.json").unlink()

    assert changed(followed, versions[3], versions[5]) == ({1: "d"}, {1: "f"})
    with pytest.raises(RowsNotReadable):
        changed(followed, versions[2], versions[5])
    assert changed(followed, versions[4], versions[5]) == ({1: "e"}, {1: "f"})


def test_rows_with_other_keys_are_left_out(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.apply(put(1, "a", 0), put(2, "a", 0))
    after = lake.apply(put(1, "b", 0), put(2, "b", 0))
    old, new = FollowedTarget(lake.uri).changed_rows(before.version, after, "id", pa.chunked_array([[2, None, 9]]))

    assert (items(old), items(new)) == ({2: "a"}, {2: "b"})


def test_rewritten_files_are_read_as_far_as_they_are_small(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.apply(put(1, "a", 0))
    lake.apply(put(2, "b", 0))
    DeltaTable(lake.uri).optimize.compact()
    after = TableVersion(lake.uri, DeltaTable(lake.uri).version(), ORDERS.relation)
    old, new = changed(FollowedTarget(lake.uri), before, after)

    assert {**new, **old} == {1: "a", 2: "b"}
    assert new[2] == "b"


def test_many_rewritten_rows_are_left_to_a_search(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.apply(*(put(number, "a", 0) for number in range(MOST_ROWS + 1)))
    DeltaTable(lake.uri).delete("id = 7")
    after = TableVersion(lake.uri, DeltaTable(lake.uri).version(), ORDERS.relation)

    with pytest.raises(RowsNotReadable):
        changed(FollowedTarget(lake.uri), before, after)


def test_a_table_whose_columns_changed_is_left_to_a_search(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.apply(put(1, "a", 0))
    table = DeltaTable(lake.uri)
    table.alter.add_columns([DeltaTable(lake.uri).schema().fields[1].__class__("more", "string")])
    after = TableVersion(lake.uri, DeltaTable(lake.uri).version(), ORDERS.relation)

    with pytest.raises(RowsNotReadable):
        changed(FollowedTarget(lake.uri), before, after)


def test_files_that_were_deleted_are_left_to_spark(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    before = lake.apply(put(1, "a", 0))
    after = lake.apply(put(1, "b", 0))
    for file in Path(lake.uri).glob("*.parquet"):
        file.unlink()

    with pytest.raises(RowsNotReadable):
        changed(FollowedTarget(lake.uri), before, after)


def test_in_a_shared_target_only_the_rows_of_the_table_are_found(tmp_path: Path) -> None:
    rule = SinkRule.model_validate({"match": "shop.*", "path": f"{tmp_path}/all", "merge_tables": True})
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=(rule,)))
    sink.open("log-1")
    versions = []
    for upto, item in ((20, "a"), (40, "b")):
        for schema in (ORDERS, replace(ORDERS, relation=2, oid=2, name="items")):
            text = f"{item} of {schema.name}"
            made = sink.apply(
                batch([put(1, text, upto)], upto - 20, upto, schema, generation=1 if upto == 20 else None)
            )
        versions.append(TableVersion(made.target, made.version or 0, ORDERS.relation))
    before, after = versions

    assert changed(FollowedTarget(f"{tmp_path}/all"), before, after) == ({1: "a of orders"}, {1: "b of orders"})
