"""Which tables get a new index from the log, because the mapping of theirs cannot take a change.

`tests/faults/test_kill_search_server.py` has the rebuilds themselves.
"""

from __future__ import annotations

from pathlib import Path
from threading import active_count

import pytest

from cdc.config import load_definition
from cdc.targets.published_record import Published, TableRecord, TargetState
from pipelines.index_rebuilds import IndexRebuilds, tables_to_rebuild
from tests.config.definitions import write
from tests.contracts.folded import batch, put
from tests.fixtures.http_relay import HttpRelay
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.fixtures.waiting import until
from tests.pipelines.sinks.search_server.server_sink import merge, opened


def stopped(relation: int, reason: str | None, target: str = "orders.r1.1") -> TableRecord:
    state = TargetState.STREAMING if reason is None else TargetState.FAILED
    return TableRecord(
        relation=relation,
        topic=f"shop.t{relation}",
        target=target,
        position=1,
        version=None,
        state=state.value,
        reason=reason,
    )


def test_only_tables_that_a_mapping_stopped_are_rebuilt() -> None:
    tables = [
        stopped(1, "CDC-3035 field 'a' has values of another type → build a new index"),
        stopped(2, None),
        stopped(3, "CDC-3037 index was deleted → build the index again"),
        stopped(4, "CDC-3035 to create index → correct the definition", target=""),
    ]

    assert tables_to_rebuild(Published(1, 0, {table.relation: table for table in tables})) == ["shop.t1"]
    assert tables_to_rebuild(None) == []


@pytest.mark.parametrize(("policy", "threads"), [("evolve", 0), ("rebuild", 1)])
def test_a_sink_is_checked_only_if_its_policy_says_so(policy: str, threads: int, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: shop\nsource: {dsn: 'postgresql://cdc@localhost/shop'}\ntables: [{match: 'shop.*'}]\nlog: {path: log}\n"
        "sinks:\n- {name: find, type: search, engine: opensearch, server: {url: 'http://127.0.0.1:1'}, "
        f"schema_changes: {policy}}}\n",
    )
    before = active_count()
    with IndexRebuilds(load_definition(path), path):
        assert active_count() - before == threads
    assert active_count() == before


def test_the_checks_share_one_connection(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, tmp_path: Path
) -> None:
    find = search_sink(opensearch)
    merge(opened(find), batch([put(1, "mug", 10)], 0, 20))
    path = write(
        tmp_path,
        "name: shop\nsource: {dsn: 'postgresql://cdc@localhost/shop'}\ntables: [{match: 'shop.*'}]\nlog: {path: log}\n"
        "sinks:\n- {name: find, type: search, engine: opensearch, schema_changes: rebuild, "
        f"server: {{url: '{opensearch_relay.url}', index: '{find.access.index}'}}}}\n",
    )
    with IndexRebuilds(load_definition(path), path, check_every=0.05):
        until(lambda: sum("/_doc/published" in request for request in opensearch_relay.seen) >= 5, "five checks")

    assert opensearch_relay.connections == 1
