"""Commands: posted by one process, finished once by another."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

from cdc.catalog import Catalog, CommandState


def test_a_command_is_finished_once(catalog: Catalog) -> None:
    first = catalog.commands.post("shop", "stop", {"sink": "lake"})
    second = catalog.commands.post("shop", "stop", {})
    assert [command.id for command in catalog.commands.pending("shop", "stop")] == [first, second]
    catalog.commands.finish(first, {"at": 1}, ok=False)
    catalog.commands.finish(first, {"at": 2})
    catalog.commands.finish(999, {})
    found = catalog.commands.get(first)
    assert found is not None
    assert (found.state, found.result, found.payload) == (CommandState.FAILED, {"at": 1}, {"sink": "lake"})
    assert [command.id for command in catalog.commands.pending("shop", "stop")] == [second]
    assert catalog.commands.pending("other", "stop") == []
    assert catalog.commands.get(999) is None


def test_threads_lose_no_command(catalog: Catalog) -> None:
    with ThreadPoolExecutor(8) as pool:
        ids = list(pool.map(lambda n: catalog.commands.post("shop", "stop", {"n": n}), range(40)))
    assert len(set(ids)) == 40
    assert len(catalog.commands.pending("shop", "stop")) == 40


def test_a_command_says_whose_it_is_and_when_it_was_posted_and_finished(catalog: Catalog) -> None:
    before = datetime.now(UTC)
    first, second = catalog.commands.post("shop", "stop", {}), catalog.commands.post("shop", "stop", {})
    catalog.commands.finish(first, {})
    newest, older = catalog.commands.ls("shop", "stop")
    assert (newest.id, newest.pipeline, newest.finished_at) == (second, "shop", None)
    assert older.finished_at is not None
    assert before <= older.posted_at <= older.finished_at
    assert catalog.commands.ls("shop", "stop", limit=1) == [newest]
