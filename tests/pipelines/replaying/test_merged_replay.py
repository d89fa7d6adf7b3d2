"""replay of a target that several tables share: all of them in one step or none, killed or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from deltalake import DeltaTable

from cdc.config import load_definition
from cdc.errors import SinkError
from cdc.failpoint import VARIABLE
from cdc.table import TableState
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from tests.fixtures import forked
from tests.log.rows import row
from tests.pipelines.shop_pipeline import (
    END,
    ITEMS,
    ORDERS,
    KeptShop,
    ShopPipeline,
    applied_shop,
    change,
    delta_rows,
    schemas,
)

KILLED = -9
Rows = dict[tuple[int, int], str | None]
"""By table and key."""
POINTS = ["replay_before_table", "replay_after_table", pytest.param("replay_before_publish", marks=pytest.mark.slow)]


def merge_and_drive(shop: ShopPipeline) -> None:
    merge(shop)
    shop.drive("lake", 1_200)


@cache
def merged() -> KeptShop:
    return KeptShop(merge_and_drive)


@pytest.fixture(name="shop")
def _shop() -> ShopPipeline:
    """A log with a history of two tables with equal keys, applied to one target up to its middle."""
    return merged().put()


def merge(shop: ShopPipeline) -> None:
    """Give the lake a rule that puts both tables together."""
    path, lake = shop.folder / "shop.yaml", "lake/{schema}/{table}'"
    rule = f"{{match: 'shop.*', path: '{shop.folder}/lake/all', merge_tables: true}}"
    path.write_text(path.read_text().replace(f"{lake}}}", f"{lake}, rules: [{rule}]}}"))
    shop.definition = load_definition(path)


def held(shop: ShopPipeline) -> Rows:
    found = delta_rows(f"{shop.folder}/lake/all")
    rows = {(row["_relation"], row["id"]): row["note"] for row in found}
    assert len(rows) == len(found)
    return rows


@pytest.fixture(name="right")
def _right() -> Rows:
    """What a driver makes of the same log in a target for each table."""
    lake, tables = applied_shop().lake(), {ORDERS: "shop.orders", ITEMS: "shop.items"}
    return {(relation, row["id"]): row["note"] for relation, topic in tables.items() for row in lake[topic]}


def test_a_damaged_target_is_again_what_the_log_says_of_all_its_tables(shop: ShopPipeline, right: Rows) -> None:
    DeltaTable(f"{shop.folder}/lake/all").delete("id > 3")
    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == right
    assert [table.position for table in shop.lake_of().tables()] == [END, END]

    late = {of: change(1_500, n, 5, f"late{n}", op="u", of=of) for n, of in enumerate((ORDERS, ITEMS))}
    shop.append(1_500, list(late.values()))
    shop.drive("lake", 1_500)
    assert held(shop) == right | {(ORDERS, 5): "late0", (ITEMS, 5): "late1"}


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_goes_on_from_what_a_killed_replay_left(shop: ShopPipeline, right: Rows, point: str) -> None:
    command = ("pipelines", "replay", "lake", "-c", shop.folder / "shop.yaml")
    assert forked.run(*command, environment={VARIABLE: point}, timeout=90).status == KILLED
    shop.drive("lake")
    assert held(shop) == right
    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == right


def test_a_table_that_was_dropped_leaves_with_the_replay_and_one_that_cannot_be_built_stops_it(
    shop: ShopPipeline, right: Rows
) -> None:
    dropped = replace(schemas()[1], state=TableState.DROPPED, reason="dropped")
    said = row(1_500, 0, op="s", relation=ITEMS, topic="shop.items", key=None, after=None, payload=dropped.to_json())
    shop.append(1_500, [said])
    before = held(shop)
    with pytest.raises(SinkError, match=r"would lose table 'shop\.items'"):
        replay(shop.definition, ReplayOptions(sink="lake"))
    assert held(shop) == before
    shop.drive("lake", 1_500)
    assert {relation for relation, _ in held(shop)} == {ORDERS, ITEMS}

    assert not replay(shop.definition, ReplayOptions(sink="lake")).ok
    wanted = {key: note for key, note in right.items() if key[0] == ORDERS}
    assert held(shop) == wanted
    states = {table.topic: (table.state, table.position) for table in shop.lake_of().tables()}
    assert states == {"shop.orders": ("streaming", 1_500), "shop.items": ("failed", 0)}
    again = replace(schemas()[1], relation=7, oid=7)
    shop.append(
        1_600,
        [
            row(1_600, 0, op="s", relation=7, topic="shop.items", key=None, after=None, payload=again.to_json()),
            row(1_600, 1, relation=7, topic="shop.items", key=["1"], after=[(1, "1"), (2, "anew")]),
        ],
    )
    shop.drive("lake", 1_600)
    assert held(shop) == wanted | {(7, 1): "anew"}


def test_tables_with_targets_of_their_own_come_together_by_a_replay(right: Rows) -> None:
    shop = applied_shop(upto=1_200)
    merge(shop)
    shop.drive("lake")
    assert {table.state for table in shop.lake_of().tables()} == {"failed"}

    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == right
    assert {table.target for table in shop.lake_of().tables()} == {f"{shop.folder}/lake/all"}
