"""`cdc search`: the rows of a table that contain all words, from the search sink that has the table."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest

from cdc.targets.published_record import Published
from pipelines.sinks.search.sink import SearchSink
from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.contracts.folded import batch, put
from tests.fixtures.search_stores import SearchStore, mugs

SEARCH = "  - {name: find, type: search, path: find}\n"


def test_rows_are_found_by_their_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    definition = write(tmp_path, SOUND + SEARCH)
    sink = SearchSink("find", str(tmp_path / "find"))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "blue mug", 10), put(2, "red mug", 10)], 0, 20))
    sink.publish(Published(20, 20_000_000, {record.relation: record}))
    sink.close()

    found = run(capsys, "search", "orders", "mug blue", "-c", definition, "--json")

    assert found.status == 0, found.errors
    assert [row["key"] for row in found.envelope["result"]["rows"]] == [["1"]]
    assert (found.envelope["result"]["topic"], found.envelope["result"]["position"]) == ("shop.orders", "0/14")
    unknown = run(capsys, "search", "shop.none", "mug", "-c", definition)
    assert (unknown.status, "choose one of these tables: shop.orders" in unknown.errors) == (2, True)


def test_documents_of_other_rules_are_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sink = SearchSink("find", str(tmp_path / "find"))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "blue mug", 10)], 0, 20))
    sink.publish(Published(20, 20_000_000, {record.relation: record}))
    sink.close()
    definition = write(tmp_path, SOUND + SEARCH.replace("}", ", except_column_list: [item]}"))

    refused = run(capsys, "search", "orders", "mug", "-c", definition)
    assert (refused.status, "blue" in refused.output + refused.errors) == (1, False)
    assert "CDC-3019" in refused.errors
    assert "restart the apply process" in refused.errors


def test_pages_follow_each_other_and_a_search_waits_for_a_position(
    search_store: SearchStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (sink,) = search_store.definition.sinks
    assert sink.type == "search"
    server = None if sink.server is None else {"url": sink.server.url, "index": sink.server.index}
    keys = "path: find" if server is None else f"engine: opensearch, server: {json.dumps(server)}"
    definition = write(tmp_path, f"{SOUND}  - {{name: find, type: search, {keys}}}\n")
    search_store.publish(mugs(range(5)), 20)

    first = run(capsys, "search", "orders", "mug", "--limit", "3", "-c", definition, "--json")
    token = first.envelope["result"]["next"]
    second = run(capsys, "search", "orders", "mug", "--limit", "3", "--after", token, "-c", definition, "--json")

    assert "further rows are left out because of --limit" in first.envelope["summary"]
    keys_found = [row["key"][0] for page in (first, second) for row in page.envelope["result"]["rows"]]
    assert (sorted(keys_found), second.envelope["result"]["next"]) == (["0", "1", "2", "3", "4"], None)
    late = ("search", "orders", "mug", "--min-position", "0/15", "-c", definition)
    early = run(capsys, *late, "--timeout", "50ms", "--json")
    assert (early.status, early.envelope["error"]["code"]) == (1, "CDC-5003")
    assert "is at 0/14: it did not reach 0/15 within 0.05 s" in early.envelope["error"]["message"]
    publishing = Thread(target=search_store.publish, args=(mugs([5], 25), 40))
    publishing.start()
    found = run(capsys, *late, "--sink", "find", "--timeout", "1m", "--json")
    publishing.join()
    assert (len(found.envelope["result"]["rows"]), found.envelope["result"]["position"]) == (6, "0/28")


def test_a_timeout_without_a_unit_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "search", "orders", "mug", "--timeout", "10", "-c", write(tmp_path, SOUND + SEARCH))
    assert (outcome.status, "expected a duration with its unit" in outcome.errors) == (2, True)


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [(SOUND, 2, "pipeline 'shop' has no search sink"), (SOUND + SEARCH, 1, "no search index at")],
    ids=["no sink", "no index yet"],
)
def test_without_an_index_it_is_an_error(
    text: str, status: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "search", "shop.orders", "mug", "-c", write(tmp_path, text))
    assert (outcome.status, message in outcome.errors) == (status, True)
