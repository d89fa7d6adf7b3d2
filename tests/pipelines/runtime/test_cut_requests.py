"""Requests that a sink ends a batch at a position, as commands of the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.targets.published_record import Published
from pipelines.runtime.cut_requests import CUT, RELEASE, CutRequests


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        yield catalog


def test_requests_of_a_sink_are_found(catalog: Catalog) -> None:
    for position in (30, 10, 20):
        catalog.commands.post("shop", CUT, {"sink": "lake", "position": position})
    catalog.commands.post("shop", CUT, {"sink": "find", "position": 15})
    requests = CutRequests(catalog, "shop")

    assert sorted(cut.position for cut in requests.open("lake")) == [10, 20, 30]
    assert [cut.position for cut in requests.open("find")] == [15]
    assert requests.open("none") == []


def test_a_refused_request_is_answered_with_the_reason(catalog: Catalog) -> None:
    command = catalog.commands.post("shop", CUT, {"sink": "lake", "position": 10})
    requests = CutRequests(catalog, "shop")
    (cut,) = requests.open("lake")
    requests.refuse(cut, "too late")

    answered = catalog.commands.get(command)
    assert answered is not None
    assert answered.result == {"reason": "too late"}
    assert requests.open("lake") == []


def test_a_request_that_was_abandoned_takes_no_answer(catalog: Catalog) -> None:
    command = catalog.commands.post("shop", CUT, {"sink": "lake", "position": 10})
    requests = CutRequests(catalog, "shop")
    (cut,) = requests.open("lake")
    assert catalog.commands.finish(command, {"reason": "abandoned"}, ok=False)

    assert not requests.answer(cut, Published(10, 0, {}), "handle")
    answered = catalog.commands.get(command)
    assert answered is not None
    assert answered.result == {"reason": "abandoned"}


def test_a_released_snapshot_is_returned_once(catalog: Catalog) -> None:
    catalog.commands.post("shop", RELEASE, {"sink": "lake", "handle": "a"})
    catalog.commands.post("shop", RELEASE, {"sink": "find", "handle": "b"})
    requests = CutRequests(catalog, "shop")

    assert [requests.pop_releases("lake") for _ in range(2)] == [["a"], []]
