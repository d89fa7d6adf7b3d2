"""The indexes of a sink on its server: which are in use, which a replay builds, and which may be deleted."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from cdc.config.search_sink import search_fingerprint
from cdc.errors import ConfigError, SinkOfAnotherLog, SinkUnavailable
from cdc.targets.published_record import Published, TableRecord, TargetState
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.index_inventory import (
    IndexUse,
    ListedIndex,
    SinkIndex,
    drop_index,
    indexes_of_sink,
    list_indexes,
    select_unused,
    unused,
)
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.sinks.search_server.server_sink import LOG, Index, merge, opened
from tests.pipelines.sinks.search_server.test_staged_indexes import build


@pytest.fixture
def find(opensearch):
    return search_sink(opensearch)


def listed(definition, *, replaying: bool = False, log_id: str = LOG) -> list[ListedIndex]:
    with SearchClient(definition.access, "opensearch") as client:
        return list_indexes(client, definition.name, log_id, replaying=replaying)


def uses(definition, *, replaying: bool = False) -> dict[str, IndexUse]:
    return {index.name: index.use for index in listed(definition, replaying=replaying)}


def test_a_replaced_index_is_unused_since_the_switch(find):
    merge(opened(find), batch([put(1, "old", 10), put(2, "old", 10)], 0, 20))
    staged, old = StagedSearchServer(find), Index(find).name
    built = build(staged, put(1, "new", 10))
    staged.open_published(LOG)
    switched = int(time.time())
    staged.put(built, {})
    first, second = listed(find)

    assert (first.name, first.topic, first.documents, first.use) == (old, "shop.orders", 2, IndexUse.UNUSED)
    assert first.unused_since is not None
    assert switched <= first.unused_since <= time.time()
    assert (second.name, second.use, second.unused_since) == (Index(find).name, IndexUse.IN_USE, None)
    assert first.bytes > 0


def test_a_staged_index_is_being_built_while_the_replay_runs_and_unused_after_it_died(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged, old = StagedSearchServer(find), Index(find).name
    new = build(staged, put(1, "new", 10)).tables[ORDERS.relation].target

    assert uses(find, replaying=True) == {old: IndexUse.IN_USE, new: IndexUse.BEING_BUILT}
    assert uses(find) == {old: IndexUse.IN_USE, new: IndexUse.UNUSED}


def test_an_index_behind_an_alias_of_an_application_is_in_use(find):
    merge(opened(find), batch([put(1, "old", 10)], 0, 20))
    staged, index = StagedSearchServer(find), Index(find)
    old, built = index.name, build(staged, put(1, "new", 10))
    staged.open_published(LOG)
    staged.put(built, {})
    index.ask("PUT", f"/{old}/_alias/{find.access.index.partition('{')[0]}reports")

    assert uses(find) == {old: IndexUse.IN_USE, index.name: IndexUse.IN_USE}


def test_the_first_index_of_a_table_is_being_built_until_it_is_published(find):
    sink = opened(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    sink.apply(batch([put(1, "b", 30)], 20, 40, replace(ORDERS, relation=17, name="notes")))

    assert sorted(uses(find).values()) == [IndexUse.BEING_BUILT, IndexUse.IN_USE]


def test_the_index_of_a_table_that_another_one_replaced_is_unused(find):
    sink = opened(find)
    merge(sink, batch([put(1, "a", 10)], 0, 20))
    old = Index(find).name
    merge(sink, batch([put(1, "b", 30)], 20, 40, replace(ORDERS, relation=ORDERS.relation + 1)))

    assert uses(find) == {old: IndexUse.UNUSED, Index(find).name: IndexUse.IN_USE}


def test_indexes_of_others_are_not_listed(find, opensearch):
    merge(opened(find), batch([put(1, "a", 10)], 0, 20))
    other = search_sink(opensearch, {"name": "other"}, index=f"{opensearch.prefix}o-{{table}}")
    merge(opened(other), batch([put(1, "a", 10)], 0, 20))
    Index(find).ask("PUT", f"/{opensearch.prefix}foreign")

    assert list(uses(find)) == [Index(find).name]


def test_the_indexes_of_another_log_and_of_a_sink_without_any_are_errors(find, opensearch):
    with pytest.raises(SinkUnavailable, match="no indexes"):
        listed(find)
    merge(opened(find), batch([put(1, "a", 10)], 0, 20))
    with pytest.raises(SinkOfAnotherLog, match="log-1"):
        listed(find, log_id="log-2")


def test_only_unused_indexes_that_are_old_enough_are_selected():
    kept = ListedIndex("a", "t", 1, 1, IndexUse.IN_USE, None)
    staged = ListedIndex("b", "t", 1, 1, IndexUse.BEING_BUILT, None)
    old, young = (ListedIndex(name, "t", 1, 1, IndexUse.UNUSED, since) for name, since in (("c", 10.0), ("d", 30.0)))
    all_of_them = [kept, staged, old, young]

    assert select_unused(all_of_them, (), 20) == [old]
    assert select_unused(all_of_them, (), 30) == [old, young]
    assert select_unused(all_of_them, ("d",), 30) == [young]
    for name, message in {"a": "is in use", "b": "is being built", "x": "no index 'x'"}.items():
        with pytest.raises(ConfigError, match=message):
            select_unused(all_of_them, (name,), 30)


def test_an_index_is_deleted_once(find):
    merge(opened(find), batch([put(1, "a", 10)], 0, 20))
    name = Index(find).name
    with SearchClient(find.access, "opensearch") as client:
        assert [drop_index(client, name), drop_index(client, name)] == [True, False]


def test_only_the_indexes_of_the_sink_are_found(opensearch):
    find, other = (
        search_sink(opensearch),
        search_sink(opensearch, {"name": "other"}, index=f"{opensearch.prefix}o-{{table}}"),
    )
    record = merge(opened(find), batch([put(1, "a", 10)], 0, 20))
    merge(opened(other), batch([put(1, "a", 10)], 0, 20))
    with SearchClient(find.access, "opensearch") as client:
        found = [index for index in indexes_of_sink(client, "find", LOG) if index.name.startswith(opensearch.prefix)]

    assert found == [
        SinkIndex(record.target, "shop.orders", record.relation, 1, search_fingerprint("shop.orders", find, ()))
    ]


def test_an_index_is_unused_if_the_published_record_does_not_name_it():
    indexes = [SinkIndex(f"orders.r1.{number}", "shop.orders", 1, number, "") for number in (1, 2, 3)]
    table = TableRecord(
        relation=1,
        topic="shop.orders",
        target="orders.r1.2",
        position=1,
        version=None,
        state=TargetState.STREAMING.value,
    )

    assert [index.number for index in unused(indexes, Published(1, 0, {1: table}))] == [1, 3]
