"""What a search server refuses: each cause has its own error, nothing is lost, and everything else continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from cdc.catalog import Catalog
from cdc.config import SearchSinkDefinition
from cdc.errors import CdcError, IndexReadOnly, SearchServerDenied
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.targets.published_record import TableRecord, TargetState
from cdc.targets.search_server.index_names import alias_name
from cdc.targets.search_server.reader import SearchServerReader
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.fixtures.http_relay import Answer, HttpRelay, RefuseLarger
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.log.rows import row, schema_of
from tests.pipelines.shop_pipeline import END, FIGURES, ITEMS, ORDERS, ShopPipeline, change, make_shop

ORDERS_TOPIC, ITEMS_TOPIC = "shop.orders", "shop.items"
LARGE = "".join(f"{n:07d} " for n in range(300_000))
"""A text of 2.4 MB, of which no part is like another."""


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def drive(shop: ShopPipeline, sink: SearchSinkDefinition, upto: int) -> dict[str, TableRecord]:
    """Open the sink, apply the log up to a position as the apply process does, and return the published records."""
    log = LogReader(shop.definition.log.path)
    target = SearchServerSink(sink)
    with Catalog.open(shop.definition.catalog.url) as catalog:
        fold = RangeFolder(log, sink.name, sink.tables)
        loop = SinkLoop(target, fold, CutRequests(catalog, "shop"), SinkFigures("shop", sink.name, FIGURES))
        try:
            loop.open()
            loop(None, Position(upto))
        finally:
            loop.drain()
            target.close()
    published = SearchServerReader.open(sink).published
    assert published is not None
    return {record.topic: record for record in published.tables.values()}


def documents(sink: SearchSinkDefinition, topic: str) -> dict[str | None, str | None]:
    """Return key → note of the rows that searches find."""
    return {found.key[0]: found.source["note"] for found in SearchServerReader.open(sink).documents(topic)}


def notes(position: int, **orders: str) -> list[dict[str, Any]]:
    """A transaction that changes orders, and item 7."""
    changed = [change(position, n, int(key[1:]), note, op="u") for n, (key, note) in enumerate(orders.items())]
    return [*changed, change(position, len(changed), 7, f"at {position}", op="u", of=ITEMS)]


def ask(server: str, method: str, path: str, body: Any = None) -> Any:
    """Send a request as an operator does, and return the parsed answer."""
    answer = httpx.request(method, f"{server}{path}", json=body, timeout=30)
    answer.raise_for_status()
    return answer.json()


def test_a_document_larger_than_a_request_is_a_dead_letter_until_it_is_smaller(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, shop: ShopPipeline
) -> None:
    opensearch_relay.fault(r"^(POST|PUT) ", RefuseLarger(1 << 20), times=None)
    find = search_sink(SharedOpenSearch(opensearch_relay.url, opensearch.prefix))
    drive(shop, find, END)
    shop.append(1_500, notes(1_500, k1="small", k5=LARGE, k6="small"))
    records = drive(shop, find, 1_500)
    reader = SearchServerReader.open(find)

    assert records[ORDERS_TOPIC].parked == (("5",),)
    assert [(letter.code, letter.image[2] == LARGE) for letter in reader.parked()] == [("CDC-3039", True)]
    found = documents(find, ORDERS_TOPIC)
    assert (found["1"], found["5"], found["6"]) == ("small", "o5", "small")
    assert documents(find, ITEMS_TOPIC)["7"] == "at 1500"

    shop.append(1_600, notes(1_600, k5="fits"))
    assert drive(shop, find, 1_600)[ORDERS_TOPIC].parked == ()
    assert documents(find, ORDERS_TOPIC)["5"] == "fits"
    ask(opensearch.url, "POST", f"/{opensearch.prefix}cdc-find/_refresh")
    stored = ask(opensearch.url, "POST", f"/{opensearch.prefix}cdc-find/_search?expand_wildcards=all", {"size": 100})
    assert {hit["_id"] for hit in stored["hits"]["hits"]} <= {"owner", "published", "started"}


def test_a_bulk_request_that_is_refused_as_invalid_stops_its_table_alone(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, shop: ShopPipeline
) -> None:
    find = search_sink(SharedOpenSearch(opensearch_relay.url, opensearch.prefix))
    drive(shop, find, END)
    shop.append(1_500, notes(1_500, k1="refused"))
    error = {"type": "x_content_parse_exception", "reason": "unexpected field"}
    opensearch_relay.fault(r"^POST .*orders.*/_bulk", Answer(400, content={"error": error}), times=None)
    records = drive(shop, find, 1_500)

    assert records[ORDERS_TOPIC].state == TargetState.FAILED
    assert (records[ORDERS_TOPIC].reason or "").startswith("CDC-3041")
    assert records[ITEMS_TOPIC].state == TargetState.STREAMING
    assert (documents(find, ORDERS_TOPIC)["1"], documents(find, ITEMS_TOPIC)["7"]) == ("newest", "at 1500")


def test_an_index_with_too_many_fields_stops_its_table_alone(opensearch: SharedOpenSearch, shop: ShopPipeline) -> None:
    find = search_sink(opensearch, settings={"mapping.total_fields.limit": 8})
    drive(shop, find, END)
    wider = schema_of(ORDERS, "note", *(f"c{n}" for n in range(6)))
    version = row(1_500, 0, op="s", relation=ORDERS, topic=ORDERS_TOPIC, key=None, after=None, payload=wider.to_json())
    image = [(1, "1"), (2, "wide"), *((n, "x") for n in range(3, 9))]
    shop.append(1_500, [version, change(1_500, 1, 1, None, after=image, op="u")])
    shop.append(1_600, notes(1_600, k2="later"))
    records = drive(shop, find, 1_600)

    assert records[ORDERS_TOPIC].state == TargetState.FAILED
    assert (records[ORDERS_TOPIC].reason or "").startswith("CDC-3036")
    assert "mapping.total_fields.limit" in (records[ORDERS_TOPIC].reason or "")
    assert records[ITEMS_TOPIC].state == TargetState.STREAMING
    assert (documents(find, ORDERS_TOPIC)["1"], documents(find, ITEMS_TOPIC)["7"]) == ("newest", "at 1600")


def test_indexes_that_a_full_disk_made_read_only_continue_when_the_block_is_removed(
    opensearch: SharedOpenSearch, shop: ShopPipeline
) -> None:
    find, other = search_sink(opensearch), search_sink(opensearch, {"name": "other"}, index=_elsewhere(opensearch))
    for sink in (find, other):
        drive(shop, sink, END)
    blocked = f"/{opensearch.prefix}shop.*,{opensearch.prefix}cdc-find/_settings?expand_wildcards=all"
    ask(opensearch.url, "PUT", blocked, {"index.blocks.read_only_allow_delete": True})
    shop.append(1_500, notes(1_500, k1="while full"))
    with pytest.raises(IndexReadOnly) as full:
        drive(shop, find, 1_500)
    assert_names_a_remedy(full.value, "free disk space")
    assert (documents(find, ORDERS_TOPIC)["1"], documents(find, ITEMS_TOPIC)["7"]) == ("newest", "later")
    drive(shop, other, 1_500)
    ask(opensearch.url, "PUT", blocked, {"index.blocks.read_only_allow_delete": None})
    drive(shop, find, 1_500)

    for topic in (ORDERS_TOPIC, ITEMS_TOPIC):
        assert documents(find, topic) == documents(other, topic)


def test_an_alias_that_got_a_foreign_index_stops_its_table_alone(
    opensearch: SharedOpenSearch, shop: ShopPipeline
) -> None:
    find = search_sink(opensearch)
    drive(shop, find, END)
    alias, foreign = alias_name(find.access.index, "shop", "orders"), f"{opensearch.prefix}foreign"
    ask(opensearch.url, "PUT", f"/{foreign}", {"aliases": {alias: {}}})
    shop.append(1_500, notes(1_500, k1="taken"))
    records = drive(shop, find, 1_500)

    assert records[ORDERS_TOPIC].state == TargetState.FAILED
    assert (records[ORDERS_TOPIC].reason or "").startswith(f"CDC-3034 index '{foreign}'")
    assert records[ITEMS_TOPIC].state == TargetState.STREAMING
    assert documents(find, ITEMS_TOPIC)["7"] == "at 1500"
    assert foreign in ask(opensearch.url, "GET", f"/_alias/{alias}")


@pytest.mark.parametrize("pattern", [r"^GET / ?$", r"/_bulk", r"/_refresh", r"/_doc/published"])
def test_rejected_credentials_lose_nothing(
    opensearch: SharedOpenSearch, opensearch_relay: HttpRelay, shop: ShopPipeline, pattern: str
) -> None:
    find = search_sink(opensearch, url=opensearch_relay.url)
    drive(shop, find, END)
    content = {"error": {"type": "security_exception", "reason": "missing authentication credentials"}, "status": 401}
    fault = opensearch_relay.fault(pattern, Answer(401, content=content), times=None)
    shop.append(1_500, notes(1_500, k1="denied"))
    with pytest.raises(SearchServerDenied) as denied:
        drive(shop, find, 1_500)
    assert_names_a_remedy(denied.value, "user and password")
    opensearch_relay.faults.clear()
    drive(shop, find, 1_500)

    assert fault.done > 0
    assert (documents(find, ORDERS_TOPIC)["1"], documents(find, ITEMS_TOPIC)["7"]) == ("denied", "at 1500")


def assert_names_a_remedy(error: CdcError, words: str) -> None:
    assert words in error.fix


def _elsewhere(server: SharedOpenSearch) -> str:
    return f"{server.prefix}other-{{schema}}.{{table}}"
