"""`cdc indexes`: old indexes of a search server sink are listed and deleted, and no other index ever is."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.process_lease import sole_replay
from cdc.config import SearchSinkDefinition, load_definition
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.table import TableSchema
from cdc.targets.published_record import Published
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.log.rows import IDENTITY
from tests.pipelines.cold_log import EACH_OF_ITS_OWN
from tests.pipelines.sinks.search_server.server_sink import Index, items, merge, opened, publish


@dataclass
class Shop:
    """A definition with a sink on the server that has published once, and another sink on the same server."""

    path: Path
    find: SearchSinkDefinition
    other: SearchSinkDefinition
    log_id: str

    def build(self, item: str) -> tuple[StagedSearchServer, Published]:
        """Build a new index, as a replay does, without publishing it."""
        staged = StagedSearchServer(self.find)
        staged.forget_earlier({ORDERS.relation: ORDERS})
        staged.sink.open(self.log_id)
        record = staged.sink.apply(batch([put(1, item, 10)], 0, 20, generation=5))
        built = Published(20, 0, {record.relation: record})
        staged.sink.publish(built)
        return staged, built

    def replay(self, item: str) -> None:
        """Replace the index, as a replay does."""
        staged, built = self.build(item)
        staged.open_published(self.log_id)
        staged.put(built, {})

    def replay_of(self, schema: TableSchema) -> None:
        """Build an index of a table that the sink did not have, as the only one."""
        staged = StagedSearchServer(self.find)
        staged.forget_earlier({schema.relation: schema})
        staged.sink.open(self.log_id)
        record = staged.sink.apply(batch([put(1, "of another table", 10)], 0, 20, schema, generation=5))
        built = Published(20, 0, {record.relation: record})
        staged.sink.publish(built)
        staged.open_published(self.log_id)
        staged.put(built, {})

    @property
    def all(self) -> set[str]:
        """All indexes of the test."""
        index = Index(self.find)
        return set(index.ask("GET", f"/{self.find.access.index.partition('{')[0]}*?expand_wildcards=all"))


@pytest.fixture
def shop(opensearch: SharedOpenSearch, tmp_path: Path) -> Shop:
    find = search_sink(opensearch)
    other = search_sink(opensearch, {"name": "other"}, index=f"{opensearch.prefix}o-{{table}}")
    path = write(tmp_path, SOUND + "".join(map(_line, (find, other))))
    root = load_definition(path).log.root
    LogWriter.open(root, IDENTITY, EACH_OF_ITS_OWN)
    log_id = LogReader(root).log_id
    for sink in (find, other):
        merge(opened(sink, log_id), batch([put(1, "first", 10)], 0, 20))
    return Shop(path, find, other, log_id)


def _line(sink: SearchSinkDefinition) -> str:
    server = {"url": sink.access.url, "index": sink.access.index}
    keys = {"name": sink.name, "type": "search", "engine": "opensearch", "server": server}
    return f"  - {json.dumps(keys)}\n"


def test_ls_shows_what_each_index_is_used_for(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    old = Index(shop.find).name
    shop.replay("second")
    new = Index(shop.find).name
    staged, _ = shop.build("third")
    staged.discard()
    with Catalog.open(load_definition(shop.path).catalog.url) as catalog, sole_replay(catalog, "shop", "find"):
        found = run(capsys, "indexes", "ls", "find", "-c", shop.path, "--json")
    assert found.status == 0, found.errors
    indexes = {one["name"]: one for one in found.envelope["result"]["indexes"]}
    uses = {name: one["use"] for name, one in indexes.items()}
    assert uses == {old: "unused", new: "in use", new.removesuffix("2") + "3": "being built"}
    assert (indexes[old]["topic"], indexes[old]["documents"]) == ("shop.orders", 1)
    people = run(capsys, "indexes", "ls", "find", "-c", shop.path)
    assert "unused since 20" in people.output
    assert "3 indexes of sink 'find'; 2 unused" in people.output


def test_drop_deletes_the_old_indexes_and_nothing_else(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    old, index = Index(shop.find).name, Index(shop.find)
    index.ask("PUT", f"/{shop.find.access.index.partition('{')[0]}foreign")
    shop.replay("second")
    before = shop.all
    done = run(capsys, "indexes", "drop", "find", "--yes", "-c", shop.path, "--json")

    assert done.status == 0, done.errors
    assert done.envelope["result"]["dropped"] == [old]
    assert before - shop.all == {old}
    assert (items(shop.find), items(shop.other)) == ({"1": "second"}, {"1": "first"})
    with Catalog.open(load_definition(shop.path).catalog.url) as catalog:
        assert [entry.action for entry in catalog.audit.ls()] == ["indexes.drop"]
    again = run(capsys, "indexes", "drop", "find", "-c", shop.path)
    assert (again.status, "no index to delete" in again.output) == (0, True)


ITEMS = replace(ORDERS, relation=16_385, oid=16_385, name="items")


def test_the_index_of_a_table_that_left_the_sink_is_dropped(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    """A replay builds the tables that the definition has now, so another table leaves the sink with it."""
    index = Index(shop.find)
    left = index.name
    shop.replay_of(ITEMS)

    assert index.status("GET", f"/{index.alias}/_search") == 404
    dropped = run(capsys, "indexes", "drop", "find", "--yes", "-c", shop.path, "--json")
    assert dropped.envelope["result"]["dropped"] == [left]


def test_the_index_of_a_table_that_came_back_is_kept(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    left = Index(shop.find).name
    shop.replay_of(ITEMS)
    sink = opened(shop.find, shop.log_id)
    record = sink.apply(batch([put(2, "back", 30)], 20, 40))
    kept = run(capsys, "indexes", "drop", "find", "--yes", "-c", shop.path)
    assert (kept.status, "no index to delete" in kept.output, left in shop.all) == (0, True, True)
    publish(sink, record)

    assert items(shop.find)["2"] == "back"


def test_drop_asks_before_it_deletes(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    old = Index(shop.find).name
    shop.replay("second")
    refused = run(capsys, "indexes", "drop", "find", "-c", shop.path)

    assert (refused.status, "→ add --yes" in refused.errors, old in refused.output) == (2, True, True)
    assert old in shop.all


def test_drop_keeps_what_was_used_lately(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    old = Index(shop.find).name
    shop.replay("second")
    kept = run(capsys, "indexes", "drop", "find", "--older-than", "1d", "--yes", "-c", shop.path)
    assert (kept.status, "no index to delete" in kept.output, old in shop.all) == (0, True, True)
    other = run(capsys, "indexes", "ls", "other", "-c", shop.path)
    assert "1 index of sink 'other'; 0 unused" in other.output
    wrong = run(capsys, "indexes", "drop", "find", "--older-than", "1", "--yes", "-c", shop.path)
    assert (wrong.status, "expected a duration with its unit" in wrong.errors) == (2, True)


def test_an_index_in_use_is_refused_by_name(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    old = Index(shop.find).name
    shop.replay("second")
    current, foreign = Index(shop.find).name, Index(shop.other)
    with_alias = foreign.ask("GET", f"/{shop.other.access.index.format(table='orders')}")
    for name, message in {current: "is in use", next(iter(with_alias)): "has no index"}.items():
        refused = run(capsys, "indexes", "drop", "find", name, "--yes", "-c", shop.path)
        assert (refused.status, message in refused.errors) == (2, True)
    dropped = run(capsys, "indexes", "drop", "find", old, "--yes", "-c", shop.path)
    assert (dropped.status, "deleted 1 index of sink 'find'" in dropped.output) == (0, True)
    assert old not in shop.all


def test_nothing_is_deleted_while_a_replay_runs(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    shop.replay("second")
    staged, _ = shop.build("third")
    staged.discard()
    before = shop.all
    with Catalog.open(load_definition(shop.path).catalog.url) as catalog, sole_replay(catalog, "shop", "find"):
        refused = run(capsys, "indexes", "drop", "find", "--yes", "-c", shop.path)
    assert (refused.status, "a replay of sink 'find' or 'cdc indexes drop' is running" in refused.errors) == (3, True)
    assert shop.all == before


def test_a_sink_without_a_server_is_refused(capsys: pytest.CaptureFixture[str], shop: Shop) -> None:
    refused = run(capsys, "indexes", "ls", "lake", "-c", shop.path)
    assert (refused.status, "this definition has: 'find', 'other'" in refused.errors) == (2, True)
