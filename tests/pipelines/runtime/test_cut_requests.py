"""Requests that a sink ends a batch at a position, as commands of the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from pipelines.runtime.cut_requests import CUT, RELEASE, CutRequests


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        yield catalog


def test_requests_of_a_sink_are_found_by_their_position(catalog: Catalog) -> None:
    for position in (30, 10, 20):
        catalog.commands.post("shop", CUT, {"sink": "lake", "position": position})
    catalog.commands.post("shop", CUT, {"sink": "find", "position": 15})
    requests = CutRequests(catalog, "shop")

    assert [cut.position for cut in requests.between("lake", 10, 40)] == [20, 30]
    assert sorted(cut.position for cut in requests.due("lake", 20)) == [10, 20]
    assert requests.has_requests("find")
    assert not requests.has_requests("none")


def test_a_refused_request_is_answered_with_the_reason(catalog: Catalog) -> None:
    command = catalog.commands.post("shop", CUT, {"sink": "lake", "position": 10})
    requests = CutRequests(catalog, "shop")
    (cut,) = requests.due("lake", 10)
    requests.refuse(cut, "too late")

    answered = catalog.commands.get(command)
    assert answered is not None
    assert answered.result == {"reason": "too late"}
    assert not requests.has_requests("lake")


def test_requests_that_were_read_are_kept_for_a_while_and_an_answered_one_is_not(catalog: Catalog) -> None:
    first = catalog.commands.post("shop", CUT, {"sink": "lake", "position": 10})
    kept, fresh = CutRequests(catalog, "shop", every=3_600.0), CutRequests(catalog, "shop")
    (cut,) = kept.due("lake", 10)
    catalog.commands.post("shop", CUT, {"sink": "lake", "position": 20})
    assert [cut.command for cut in kept.due("lake", 30)] == [first]
    assert [cut.position for cut in fresh.due("lake", 30)] == [10, 20]
    kept.refuse(cut, "too late")

    assert not kept.has_requests("lake")


def test_a_released_snapshot_is_returned_once(catalog: Catalog) -> None:
    catalog.commands.post("shop", RELEASE, {"sink": "lake", "handle": "a"})
    catalog.commands.post("shop", RELEASE, {"sink": "find", "handle": "b"})
    requests = CutRequests(catalog, "shop")

    assert [requests.pop_releases("lake") for _ in range(2)] == [["a"], []]
