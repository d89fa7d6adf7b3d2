"""Pauses of a sink for a replay: leases and a command in the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from pipelines.runtime.replay_pause import ReplayPauses, driver_of, paused


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(f"sqlite:///{tmp_path / 'catalog.db'}") as catalog:
        yield catalog


def test_a_sink_is_paused_inside_the_block_only(catalog: Catalog) -> None:
    pauses = ReplayPauses(catalog, "shop")
    with paused(catalog, "shop", "lake"):  # no apply process runs, so nothing is waited for
        assert pauses.is_paused("lake")
        assert not pauses.is_paused("find")
    assert not pauses.is_paused("lake")


def test_without_a_report_there_is_no_driver(catalog: Catalog) -> None:
    assert driver_of(catalog, "shop") is None
