"""replay: a target built from the log alone is what applying the log had made, and it replaces it in one step."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from deltalake import DeltaTable

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.process_lease import sole_replay
from cdc.config import DeltaSinkDefinition, SchemaChanges, load_definition
from cdc.errors import ConfigError, SinkInUse
from cdc.table import Column
from cdc.target_names import published_uri
from cdc.targets.dead_letter_rows import read_parked
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import TargetState
from cdc.targets.search_index_reader import SearchIndex
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.replay_pause import ReplayPauses, paused
from pipelines.sink_lifecycle import SinkRunner
from pipelines.sink_parts import SinkParts
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import target_schema
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.waiting import until
from tests.log.rows import row, schema_of
from tests.pipelines.shop_pipeline import END, FIGURES, ITEMS, ORDERS, ShopPipeline, applied_shop, change, delta_rows
from tests.pipelines.spark_starts import spark_that_never_starts


def again(shop: ShopPipeline, sink: str = "lake", **options: Any) -> None:
    """Replay and expect every table to be built."""
    assert replay(shop.definition, ReplayOptions(sink=sink, **options)).ok


ID = Column(id=1, name="id", type_oid=23, type_name="integer", key=0)
NOTE = Column(id=2, name="note", type_oid=25, type_name="text")
AT = Column(id=3, name="at", type_oid=1114, type_name="timestamp without time zone")


def states(shop: ShopPipeline) -> dict[str, str]:
    """By table, as the Delta sink published it last."""
    record = shop.lake_of().published()
    return {} if record is None else {table.topic: table.state for table in record.tables.values()}


def damage(table: Path) -> None:
    """What a careless hand does to a Delta table."""
    held = DeltaTable(str(table))
    held.delete("id = 5")
    held.update(updates={"note": "'wrong'"}, predicate="id = 6")


def test_a_damaged_table_becomes_what_the_log_says_in_one_commit_and_keeps_its_history_and_readers() -> None:
    shop = applied_shop()
    right, orders = shop.lake(), shop.folder / "lake/shop/orders"
    before = DeltaTable(str(orders))
    damage(orders)
    opened, wrong = DeltaTable(str(orders)), delta_rows(str(orders))
    assert wrong != right["shop.orders"]
    again(shop)
    after = DeltaTable(str(orders))
    assert shop.lake() == right
    assert delta_rows(str(orders)) == right["shop.orders"]
    assert (after.metadata().id, after.version()) == (before.metadata().id, opened.version() + 1)
    assert after.metadata().configuration == before.metadata().configuration
    assert delta_rows(str(orders), before.version()) == right["shop.orders"]
    assert delta_rows(str(orders), opened.version()) == wrong

    commit = (orders / f"_delta_log/{after.version():020d}.json").read_text().splitlines()
    assert {"add", "remove", "txn"} <= {next(iter(json.loads(line))) for line in commit}
    assert after.transaction_version(after.metadata().configuration["cdc.app_id"]) == END


def test_a_sink_goes_on_from_where_the_replay_put_it() -> None:
    shop = applied_shop(upto=1_200)
    again(shop)
    shop.append(1_500, [change(1_500, 0, 5, "late", op="u"), change(1_500, 1, 9, "late", of=ITEMS)])
    shop.drive("lake", 1_500)
    here = shop.lake()
    shutil.rmtree(shop.folder / "lake")
    shop.drive("lake", 1_500)
    assert here == shop.lake()


def test_what_the_new_target_cannot_take_is_parked_beside_the_sink_as_before(shop: ShopPipeline) -> None:
    shop.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u")])
    shop.append(1_600, [change(1_600, 0, 5, "fits", op="u")])
    template = f"{shop.folder}/lake/{{schema}}/{{table}}"
    again(shop)
    published = shop.lake_of().published()
    assert published is not None
    assert {table.topic: table.parked for table in published.tables.values()}["shop.orders"] == (("9",),)
    (held,) = read_parked(published_uri(template), published)
    assert (held.key, held.place, dict(held.image)) == (("9",), (1_500, 0), {1: "not a number", 2: "x"})
    shop.append(1_700, [change(1_700, 0, 9, "right", op="u")])
    shop.drive("lake", 1_700)
    assert [row["note"] for row in shop.lake()["shop.orders"] if row["id"] == 9] == ["right"]
    assert sorted(path.name for path in (shop.folder / "lake/_cdc").iterdir()) == ["parked", "published"]


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"stored_as_scd_type": 2}, id="scd2"),
        pytest.param({"mode": "append"}, id="append", marks=pytest.mark.slow),
    ],
)
def test_a_history_that_is_built_anew_parks_a_key_with_its_changes_and_goes_on(
    shop: ShopPipeline, said: dict[str, Any]
) -> None:
    lake, find = shop.definition.sinks
    kept = DeltaSinkDefinition.model_validate(lake.model_dump(exclude_unset=True) | said)
    shop.definition = shop.definition.model_copy(update={"sinks": (kept, find)})
    shop.append(1_500, [change(1_500, 0, 9, "x", after=[(1, "not a number"), (2, "x")], op="u")])
    shop.append(1_600, [change(1_600, 0, 5, "fits", op="u"), change(1_600, 1, 9, "later", op="u")])
    again(shop)
    shop.append(1_700, [change(1_700, 0, 9, "last", op="u"), change(1_700, 1, 6, "on", op="u")])
    shop.drive("lake", 1_700)
    published = shop.lake_of().published()
    assert published is not None
    assert published.tables[ORDERS].parked == (("9",),)
    (held,) = read_parked(published_uri(f"{shop.folder}/lake/{{schema}}/{{table}}"), published)
    assert [place.position for place in held.changes] == [1_500, 1_600, 1_700]
    rows = read_target(published.tables[ORDERS].target).read_all().to_pylist()
    notes = {row["note"] for row in rows if row["id"] in (5, 6, 9)}
    assert notes == {"o5", "fits", "o6", "on", "o9"}


def test_what_a_new_index_has_no_base_for_is_parked_in_it() -> None:
    shop = applied_shop("find")
    shop.append(1_500, [change(1_500, 0, 77, "x", after=[(1, "77"), (2, "x")], op="u", partial=True)])
    shop.append(1_600, [change(1_600, 0, 5, "fits", op="u")])
    again(shop, "find")
    index = SearchIndex.open(shop.folder / "find")
    assert index.published is not None
    assert index.published.tables[ORDERS].parked == (("77",),)
    assert [(row.key, row.place, dict(row.image)) for row in index.parked()] == [
        (("77",), (1_500, 0), {1: "77", 2: "x"})
    ]
    shop.append(1_700, [change(1_700, 0, 77, "whole", op="r")])
    shop.drive("find", 1_700)
    assert {row["id"]: row["note"] for row in shop.found()["shop.orders"] if row["id"] in ("5", "77")} == {
        "5": "fits",
        "77": "whole",
    }
    assert SearchIndex.open(shop.folder / "find").parked() == []


def test_a_lost_folder_is_made_again() -> None:
    shop = applied_shop()
    right = shop.lake()
    shutil.rmtree(shop.folder / "lake")
    again(shop)
    assert shop.lake() == right


def test_some_tables_are_put_beside_the_others_where_those_stand(shop: ShopPipeline) -> None:
    shop.drive("lake", 1_300)
    right, items = shop.lake(), shop.folder / "lake/shop/items"
    damage(shop.folder / "lake/shop/orders")
    version = DeltaTable(str(items)).version()
    again(shop, tables=("orders",))
    assert shop.lake() == right
    assert DeltaTable(str(items)).version() == version
    record = shop.lake_of().published()
    assert record is not None
    assert record.position == 1_300
    assert {table.state for table in record.tables.values()} == {TargetState.STREAMING}


def test_one_table_of_a_search_server_gets_a_new_index_and_the_others_keep_theirs(
    shop: ShopPipeline, opensearch: SharedOpenSearch
) -> None:
    find = search_sink(opensearch)
    shop.definition = shop.definition.model_copy(update={"sinks": (find,)})
    shop.drive("find", 1_300)
    before = SearchServerReader.open(find)
    assert before.published is not None
    rows = {topic: documents(before, topic) for topic in before.topics}
    old = {table.topic: table.target for table in before.published.tables.values()}
    httpx.post(f"{find.access.url}/{old['shop.orders']}/_delete_by_query?refresh", json={"query": {"match_all": {}}})
    assert documents(before, "shop.orders") == []
    again(shop, "find", tables=("orders",))
    after = SearchServerReader.open(find)
    assert after.published is not None
    new = {table.topic: table.target for table in after.published.tables.values()}

    assert {topic: documents(after, topic) for topic in after.topics} == rows
    assert {topic for topic in old if new[topic] != old[topic]} == {"shop.orders"}
    assert after.published.position == 1_300
    assert {table.state for table in after.published.tables.values()} == {TargetState.STREAMING}


def documents(reader: SearchServerReader, topic: str) -> list[dict[str, str | None]]:
    """The rows of a table by key."""
    return sorted((dict(row.source) for row in reader.documents(topic)), key=lambda row: int(row["id"] or 0))


def test_a_table_dropped_and_made_again_takes_the_place_of_the_old_one() -> None:
    shop = applied_shop()
    held = DeltaTable(str(shop.folder / "lake/shop/orders"))
    held.alter.set_table_properties({"cdc.relation": "99"}, raise_if_not_exists=False)
    again(shop)
    assert DeltaTable(held.table_uri).metadata().configuration["cdc.relation"] == "16384"
    assert len(shop.lake()["shop.orders"]) == 50


def test_columns_that_came_and_went_are_those_of_now() -> None:
    shop = applied_shop()
    now = replace(schema_of(ORDERS, "note", "at"), columns=(ID, AT))
    gone = row(1_500, 0, op="s", relation=ORDERS, topic="shop.orders", key=None, after=None, payload=now.to_json())
    shop.append(1_500, [gone, change(1_500, 1, 9, None, op="u", after=[(1, "9"), (3, "2026-01-31 12:00:00.25")])])
    again(shop)
    assert [set(row) for row in shop.lake()["shop.orders"]] == [{"id", "at", "_position", "_ordinal"}] * 50
    shop.append(1_600, [change(1_600, 0, 10, None, op="u", after=[(1, "10"), (3, "2026-02-01 00:00:00")])])
    shop.drive("lake", 1_600)
    times = {row["id"]: row["at"] for row in shop.lake()["shop.orders"] if row["at"] is not None}
    assert times == {9: datetime(2026, 1, 31, 12, 0, 0, 250_000), 10: datetime(2026, 2, 1)}  # noqa: DTZ001 - naive


def test_columns_that_a_crash_had_brought_to_the_old_target_come_to_the_new_one_in_their_turn() -> None:
    shop = applied_shop()
    now = replace(schema_of(ORDERS, "note", "at"), columns=(ID, NOTE, AT))
    wider = row(1_500, 0, op="s", relation=ORDERS, topic="shop.orders", key=None, after=None, payload=now.to_json())
    for position, rows in ((1_500, [wider]), (1_600, [])):
        image = [(1, "9"), (2, "x"), (3, "2026-02-01 00:00:00")]
        shop.append(position, [*rows, change(position, 1, 9, None, op="u", after=image)])
    target = DeltaTarget.open(str(shop.folder / "lake/shop/orders"))
    assert target is not None
    evolution = ColumnChange(
        target_schema(now, TypePolicy.EXACT), SchemaChanges.EVOLVE, replaced=False, topic="public.orders"
    )
    target.evolve_columns(evolution, 1_600)
    again(shop, tables=("shop.orders",))
    assert "at" not in shop.lake()["shop.orders"][0]
    shop.drive("lake", 1_600)

    assert states(shop) == {"shop.orders": "streaming", "shop.items": "streaming"}
    assert [row["id"] for row in shop.lake()["shop.orders"] if row["at"] is not None] == [9]


def test_where_columns_are_dropped_the_stream_leaves_those_of_a_replay() -> None:
    shop = applied_shop()
    path = shop.folder / "shop.yaml"
    path.write_text(path.read_text().replace("name: lake,", "name: lake, dropped_columns: drop,"))
    shop.definition = load_definition(path)
    now = replace(schema_of(ORDERS, "note", "at"), columns=(ID, AT))
    gone = row(1_500, 0, op="s", relation=ORDERS, topic="shop.orders", key=None, after=None, payload=now.to_json())
    shop.append(1_500, [gone, change(1_500, 1, 9, None, op="u", after=[(1, "9"), (3, "2026-01-31 12:00:00.25")])])
    shop.drive("lake", 1_500)
    streamed = shop.lake()["shop.orders"]
    again(shop)

    assert shop.lake()["shop.orders"] == streamed
    assert [set(row) for row in streamed] == [{"id", "at", "_position", "_ordinal"}] * 50


def test_a_table_that_stops_at_a_change_of_its_columns_is_built_anew_while_the_others_go_on() -> None:
    shop = applied_shop()
    path = shop.folder / "shop.yaml"
    rule = "name: lake, rules: [{match: shop.orders, schema_changes: exception}],"
    path.write_text(path.read_text().replace("name: lake,", rule))
    shop.definition = load_definition(path)
    now = replace(schema_of(ORDERS, "note", "at"), columns=(ID, AT))
    said = row(1_500, 0, op="s", relation=ORDERS, topic="shop.orders", key=None, after=None, payload=now.to_json())
    shop.append(1_500, [said, change(1_500, 1, 7, "goes on", op="u", of=ITEMS)])
    shop.drive("lake", 1_500)
    assert states(shop) == {"shop.orders": TargetState.FAILED, "shop.items": TargetState.STREAMING}
    assert len(delta_rows(f"{shop.folder}/lake/shop/orders")) == 50
    assert shop.lake()["shop.items"][0]["note"] == "goes on"
    again(shop, tables=("shop.orders",))

    assert set(states(shop).values()) == {TargetState.STREAMING}
    assert set(shop.lake()["shop.orders"][0]) == {"id", "at", "_position", "_ordinal"}
    shop.append(1_600, [change(1_600, 0, 10, None, op="u", after=[(1, "10"), (3, "2026-02-01 00:00:00")])])
    shop.drive("lake", 1_600)
    assert [row["id"] for row in shop.lake()["shop.orders"] if row["at"] is not None] == [10]


def test_a_removed_index_is_built_again() -> None:
    shop = applied_shop("find")
    right = shop.found()
    index = shop.folder / "find"

    def is_removed() -> bool:
        shutil.rmtree(index, ignore_errors=True)  # a merge of segments that the writer had begun may still end
        return not index.exists()

    until(is_removed, "the directory of the index is removed")
    again(shop, "find")
    assert shop.found() == right
    assert not (shop.folder / "find.replay").exists()


def test_a_new_index_takes_the_place_of_a_damaged_one_and_old_segments_go(shop: ShopPipeline) -> None:
    shop.drive("find", 1_200)
    again(shop, "find")
    right, segments = shop.found(), {file.stem for file in (shop.folder / "find").iterdir()}
    shop.append(1_500, [change(1_500, 0, 5, "late", op="u")])
    shop.drive("find", 1_500)
    named = json.loads((shop.folder / "find/meta.json").read_text())["segments"]
    left = {file.stem for file in (shop.folder / "find").glob("*.store")}
    assert len(left) <= len(named) < len(segments)
    assert shop.found()["shop.items"] == right["shop.items"]


def test_a_position_of_the_past_can_be_kept_apart() -> None:
    shop = applied_shop(upto=1_200)
    past = shop.lake()
    shop.drive("lake")
    now = shop.lake()
    again(shop, into=str(shop.folder / "past"), end="0/4B0")  # 1,200
    for topic, rows in past.items():
        assert delta_rows(str(shop.folder / "past" / topic.replace(".", "/"))) == rows
    assert shop.lake() == now


def test_an_index_can_be_kept_apart_with_some_tables() -> None:
    shop = applied_shop("find")
    again(shop, "find", into=str(shop.folder / "apart"), tables=("shop.it*",))
    assert shop.found("apart") == {"shop.items": shop.found()["shop.items"]}


def test_a_replay_beside_another_one_or_a_driver_that_does_not_let_go_is_refused_and_changes_nothing(
    shop: ShopPipeline,
) -> None:
    with Catalog.open(shop.definition.catalog.url) as catalog:
        with sole_replay(catalog, "shop", "lake"), pytest.raises(SinkInUse, match="a replay of sink 'lake' or"):
            again(shop)
        catalog.processes.report(ProcessReport("shop", "apply", 1, "running"))
        with pytest.raises(ConfigError, match="while the apply process runs"):
            again(shop, end="0/578")
        with pytest.raises(SinkInUse, match="'lake'"), paused(catalog, "shop", "lake", timeout=0.2):
            pass
        assert not catalog.commands.pending("shop", "pause")
        assert catalog.leases.holder("pause shop/lake") is None
    assert not (shop.folder / "lake").exists()


def test_a_running_driver_lets_go_and_goes_on_from_the_new_target(shop: ShopPipeline) -> None:
    with Catalog.open(shop.definition.catalog.url) as catalog, ThreadPoolExecutor(1) as beside:
        parts = SinkParts(
            CutRequests(catalog, "shop"), ReplayPauses(catalog, "shop"), FIGURES, spark_that_never_starts()
        )
        query = SinkRunner(shop.definition, shop.definition.sinks[0], parts)
        for _ in ("the first copy", "what came after"):
            query.step()
        right = shop.lake()
        damage(shop.folder / "lake/shop/orders")
        catalog.processes.report(ProcessReport("shop", "apply", 1, "running"))
        replayed = beside.submit(again, shop)

        def looked() -> bool:
            query.step()
            return replayed.done()

        until(looked, "the replay", every=0.0)
        replayed.result(timeout=0)
        assert shop.lake() == right
        shop.append(1_500, [change(1_500, 0, 5, "late", op="u")])
        query.step()
        query.stop()
        assert {row["id"]: row["note"] for row in shop.lake()["shop.orders"]}[5] == "late"
