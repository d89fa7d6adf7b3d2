"""Rows that changed rows and keys of a view need, read by their columns from real targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.view_sql.join_graph import ColumnOf, JoinGraph
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.table_version import RowsNotReadable, TableVersion
from pipelines.views.needed_rows import ChangedRows, NeededRows, RowsOfCuts
from tests.contracts.folded import ORDERS, batch, put

ITEMS = replace(ORDERS, relation=2, oid=2, name="items")
SQL = "SELECT o.id, i.item FROM shop.orders o JOIN shop.items i ON i.item = o.item"


class TwoTables:
    """A lake with orders and items, which have an id and an item each."""

    def __init__(self, folder: Path) -> None:
        self._sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}"))
        self._sink.open("log-1")
        self._upto = 0

    def put(self, orders: Mapping[int, str | None], items: Mapping[int, str]) -> dict[str, TableVersion]:
        """Write rows, and return the new versions by topic."""
        upto = self._upto + 20
        found = {}
        for schema, rows in ((ORDERS, orders), (ITEMS, items)):
            changes = [put(number, item, upto, ordinal=schema.relation * 100 + number) for number, item in rows.items()]
            made = self._sink.apply(batch(changes, self._upto, upto, schema, generation=None if self._upto else 1))
            assert made.version is not None
            found[made.topic] = TableVersion(made.target, made.version, made.relation)
        self._upto = upto
        return found


def graph(tables: Mapping[str, TableVersion], sql: str = SQL, key: Sequence[str] = ("id",)) -> JoinGraph:
    found = JoinGraph.of(sql, key, {topic: one.columns.names for topic, one in tables.items()})
    assert found is not None
    return found


def ids(rows: pa.Table | None) -> list[int]:
    assert rows is not None
    return sorted(rows["id"].to_pylist())


def test_changed_rows_meet_the_rows_with_equal_columns(tmp_path: Path) -> None:
    lake = TwoTables(tmp_path)
    before = lake.put({1: "a", 2: "b", 3: "c"}, {10: "a", 11: "a", 12: "b", 13: "c"})
    after = lake.put({1: "b"}, {})
    keys = pa.array([1])
    changes = {
        "shop.orders": ChangedRows(before["shop.orders"].rows("id", keys), after["shop.orders"].rows("id", keys))
    }
    found = NeededRows(graph(after), after, changes).meeting()

    assert (ids(found["shop.items"]), ids(found["shop.orders"])) == ([10, 11, 12], [1])
    orders, items = (RowsOfCuts.of(found[topic], changes.get(topic)) for topic in ("shop.orders", "shop.items"))
    assert [part["item"].to_pylist() for part in orders] == [[], ["a"], ["b"]]
    assert [ids(part) for part in items] == [[10, 11, 12], [], []]


def test_rows_that_only_an_old_row_meets_are_needed_too(tmp_path: Path) -> None:
    lake = TwoTables(tmp_path)
    before = lake.put({1: "a", 2: "b"}, {10: "a", 11: "b"})
    after = lake.put({2: "c"}, {})
    old, new = (versions["shop.orders"].rows("id", pa.array([2])) for versions in (before, after))
    changes = {"shop.orders": ChangedRows(old, new)}
    found = NeededRows(graph(after), after, changes).of_keys(pa.table({"id": [2]}))

    assert (ids(found["shop.items"]), found["shop.orders"]["item"].to_pylist()) == ([11], ["c"])


def test_a_row_that_did_not_change_stays_at_the_earlier_cut(tmp_path: Path) -> None:
    lake = TwoTables(tmp_path)
    tables = lake.put({1: "a"}, {10: "a"})
    rows = tables["shop.orders"].rows("id", pa.chunked_array([[1]]))
    changes = {"shop.orders": ChangedRows(rows, rows)}

    both, earlier, later = RowsOfCuts.of(rows, changes["shop.orders"])
    assert [ids(part) for part in (both, earlier, later)] == [[], [1], [1]]


def test_keys_need_their_rows_and_those_that_they_meet(tmp_path: Path) -> None:
    tables = TwoTables(tmp_path).put({1: "a", 2: "b"}, {10: "a", 11: "b"})
    needed = NeededRows(graph(tables), tables, {})
    found = needed.of_keys(pa.table({"id": [2]}))

    assert (ids(found["shop.orders"]), ids(found["shop.items"])) == ([2], [11])
    with pytest.raises(RowsNotReadable, match="the key of the view"):
        needed.of_keys(pa.table({"id": pa.array([None], pa.int64())}))


def test_affected_keys_are_those_that_old_and_new_rows_meet(tmp_path: Path) -> None:
    lake = TwoTables(tmp_path)
    before = lake.put({1: "a", 2: "b", 3: "c"}, {10: "a", 11: "b", 12: "z"})
    after = lake.put({}, {11: "c", 12: "y"})
    keys = pa.array([11, 12])
    changes = {"shop.items": ChangedRows(before["shop.items"].rows("id", keys), after["shop.items"].rows("id", keys))}
    needed = NeededRows(graph(after), after, changes)

    assert ids(needed.affected_keys(["id"])) == [2, 3]
    by_item = replace(needed._graph, key={"item": ColumnOf("o", "item")})
    found = NeededRows(by_item, after, changes).affected_keys(["item"])
    assert found is not None
    assert sorted(found["item"].to_pylist()) == ["b", "c", "y", "z"]  # y and z are rows of no order


def test_a_key_that_changes_affects_both_rows_and_one_that_is_null_is_left_to_spark(tmp_path: Path) -> None:
    lake = TwoTables(tmp_path)
    versions = [lake.put({1: item}, {10: "a"}) for item in ("a", "b", None)]
    rows = [tables["shop.orders"].rows("id", pa.array([1])) for tables in versions]
    by_item = graph(versions[-1], "SELECT item FROM shop.orders", ["item"])

    def keys(old: pa.Table, new: pa.Table) -> pa.Table | None:
        changes = {"shop.orders": ChangedRows(old, new)}
        return NeededRows(by_item, versions[-1], changes).affected_keys(["item"])

    assert keys(rows[0], rows[1]) == pa.table({"item": ["a", "b"]})
    assert keys(rows[1], rows[2]) is None


@pytest.mark.parametrize(
    ("key", "sql"),
    [
        (["id", "items"], SQL),
        (["id", "number"], SQL.replace("i.item FROM", "i.id AS number FROM")),
        (["id"], "SELECT o.id FROM shop.items i LEFT JOIN shop.orders o ON o.item = i.item"),
    ],
)
def test_keys_that_are_not_of_one_table_are_left_to_spark(tmp_path: Path, key: list[str], sql: str) -> None:
    tables = TwoTables(tmp_path).put({1: "a"}, {10: "a"})
    assert NeededRows(graph(tables, sql, key), tables, {}).affected_keys(key) is None


def test_a_text_that_is_equal_to_a_number_is_left_to_spark(tmp_path: Path) -> None:
    tables = TwoTables(tmp_path).put({1: "1"}, {10: "01"})
    mixed = graph(tables, "SELECT o.id FROM shop.orders o JOIN shop.items i ON i.item = o.id")
    with pytest.raises(RowsNotReadable, match="of type int64 is equal to one of type string"):
        NeededRows(mixed, tables, {}).of_keys(pa.table({"id": [1]}))
