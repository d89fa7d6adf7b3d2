"""Queries of the demo's sinks: whether a sink has reached an LSN, by its progress in the catalog."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog, SinkProgress
from cdc.demo.pipeline_observer import PIPELINE
from cdc.demo.query_runner import LakeQueries
from cdc.demo.workspace import Workspace
from cdc.lsn import Lsn
from cdc.position import Position


@pytest.fixture(name="catalog")
def _catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(Workspace(tmp_path).catalog_url) as catalog:
        yield catalog


def test_a_sink_without_progress_has_reached_no_lsn(tmp_path: Path, catalog: Catalog) -> None:
    assert not LakeQueries(Workspace(tmp_path), "lake").has_reached(catalog, Lsn(1))


def test_a_sink_has_reached_the_lsns_up_to_its_position(tmp_path: Path, catalog: Catalog) -> None:
    catalog.pipelines.put(PIPELINE, "{}")
    catalog.sinks.record(PIPELINE, SinkProgress("lake", Position.of(600, 2), None, 0.1, "running"))
    queries = LakeQueries(Workspace(tmp_path), "lake")

    assert queries.has_reached(catalog, Lsn(600))
    assert not queries.has_reached(catalog, Lsn(601))
    assert not LakeQueries(Workspace(tmp_path), "history").has_reached(catalog, Lsn(600))
