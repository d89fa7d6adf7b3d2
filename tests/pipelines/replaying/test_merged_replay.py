"""replay of a target that several tables share: all of them in one step or none, killed or not."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from deltalake import DeltaTable

from cdc.config import load_definition
from cdc.errors import SinkError
from cdc.failpoint import VARIABLE
from cdc.table import TableState
from cdc.targets.table_query import QueryRequest, queried_sink, query_tables
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


def in_state(state: TableState, position: int) -> dict[str, Any]:
    """A version of shop.items in another state."""
    version = replace(schemas()[1], state=state, reason="the reason")
    return row(position, 0, op="s", relation=ITEMS, topic="shop.items", key=None, after=None, payload=version.to_json())


def test_a_table_that_cannot_be_built_stops_a_replay_that_would_lose_it(shop: ShopPipeline) -> None:
    shop.append(1_500, [in_state(TableState.NEEDS_RESYNC, 1_500)])
    before = held(shop)
    with pytest.raises(SinkError, match=r"would lose table 'shop\.items'"):
        replay(shop.definition, ReplayOptions(sink="lake"))
    assert held(shop) == before


def test_rows_of_a_dropped_table_stay_until_another_table_has_its_name(shop: ShopPipeline, right: Rows) -> None:
    shop.append(1_500, [in_state(TableState.DROPPED, 1_500)])
    shop.drive("lake", 1_500)
    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == right
    states = {table.topic: (table.state, table.position) for table in shop.lake_of().tables()}
    assert states == {"shop.orders": ("streaming", 1_500), "shop.items": ("dropped", 1_500)}
    assert query_rows(shop, 'SELECT count(*) FROM "all"') == [[50]]

    again = replace(schemas()[1], relation=7, oid=7)
    made = {"relation": 7, "topic": "shop.items"}
    created = row(1_600, 0, op="s", key=None, after=None, payload=again.to_json(), **made)
    copied = row(1_600, 1, key=["1"], after=[(1, "1"), (2, "x")], **made)
    ended = row(1_600, 2, op="g", key=None, after=None, payload=b"1600", **made)
    shop.append(1_600, [created, copied, ended])
    shop.drive("lake", 1_600)
    assert {table.relation: table.state for table in shop.lake_of().tables()}[7] == "failed"
    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == {key: note for key, note in right.items() if key[0] == ORDERS} | {(7, 1): "x"}
    assert {table.relation: table.state for table in shop.lake_of().tables()} == dict.fromkeys((ORDERS, 7), "streaming")


def query_rows(shop: ShopPipeline, sql: str) -> list[list[Any]]:
    """The rows of a query at the published cut."""
    return [list(found) for found in query_tables(queried_sink(shop.definition, "lake"), QueryRequest(sql=sql)).rows]


def test_tables_with_targets_of_their_own_come_together_by_a_replay(right: Rows) -> None:
    shop = applied_shop(upto=1_200)
    merge(shop)
    shop.drive("lake")
    assert {table.state for table in shop.lake_of().tables()} == {"failed"}

    assert replay(shop.definition, ReplayOptions(sink="lake")).ok
    assert held(shop) == right
    assert {table.target for table in shop.lake_of().tables()} == {f"{shop.folder}/lake/all"}
