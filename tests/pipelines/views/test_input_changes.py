"""Which rows of the inputs changed, from the change log."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from cdc.log.computed_views import InputVersion
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import Published, TableRecord
from pipelines.views.input_changes import changed_keys, distinct, usable_inputs
from tests.pipelines.shop_pipeline import COPY, END, ITEMS, ORDERS, change, make_shop


def test_changed_keys_are_those_of_all_changes_with_the_old_ones_of_moved_rows(tmp_path: Path) -> None:
    log = LogReader(make_shop(tmp_path / "shop").definition.log.root)
    found = changed_keys(log, Position(COPY), Position(1_200), [ORDERS, ITEMS])

    assert found.keys() == {ORDERS}
    keys = found[ORDERS]
    assert keys is not None
    assert sorted(keys.to_pylist()) == [["1"], ["104"], ["2"], ["3"], ["4"]]


def test_after_a_truncate_or_the_end_of_a_copy_every_row_may_have_changed(tmp_path: Path) -> None:
    log = LogReader(make_shop(tmp_path / "shop").definition.log.root)

    assert changed_keys(log, Position(1_200), Position(END), [ITEMS]) == {ITEMS: None}
    assert changed_keys(log, Position(0), Position(COPY), [ORDERS, ITEMS]) == {ORDERS: None, ITEMS: None}
    assert changed_keys(log, Position(1_300), Position(END), [ITEMS])[ITEMS].to_pylist() == [["7"]]  # type: ignore[union-attr]
    assert changed_keys(log, Position(END), Position(END), [ITEMS]) == {}


def test_a_row_without_a_key_says_nothing(tmp_path: Path) -> None:
    shop = make_shop(tmp_path / "shop")
    shop.append(END + 10, [change(END + 10, 0, 1, "x", op="c") | {"key": None}])
    log = LogReader(shop.definition.log.root)

    assert changed_keys(log, Position(END), Position(END + 10), [ORDERS]) == {ORDERS: None}


def test_each_key_is_there_once() -> None:
    keys = pa.array([["a", "b"], ["a"], ["a", "b"]])
    assert sorted(distinct(keys).to_pylist()) == [["a"], ["a", "b"]]


def record(topic: str, state: str = "streaming") -> TableRecord:
    return TableRecord(7, topic, "/lake/a", 20, 3, state, parked=(("1",),))


def test_an_input_is_usable_while_its_table_is_complete() -> None:
    published = Published(20, 0, {1: record("shop.a"), 2: record("shop.b", "snapshotting"), 3: record("shop.c")})

    assert usable_inputs(published, ["shop.a", "shop.b", "shop.d"]) == {
        "shop.a": InputVersion("/lake/a", 3, 7, (("1",),))
    }
