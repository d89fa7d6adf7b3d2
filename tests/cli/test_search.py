"""`cdc search`: the rows of a table that contain all words, from the search sink that has the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.stores.published_record import Published
from pipelines.sinks.search.sink import SearchSink
from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.contracts.folded import batch, put

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
