"""Publications: what is known of records when their commits are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.targets.published_record import Published
from pipelines.sinks.delta.published_cuts_table import CLEAN_EVERY, PublishedTable
from tests.benchmarks.publications import Publications

PUBLISHES = 2 * CLEAN_EVERY + 10


@pytest.mark.slow
def test_records_are_known_after_the_sink_has_removed_their_commits(tmp_path: Path) -> None:
    template = f"{tmp_path}/{{schema}}/{{table}}"
    publications = Publications(template)
    table = PublishedTable.open(f"{tmp_path}/_cdc/published", "log", retain=3600.0)
    for position in range(1, PUBLISHES + 1):
        table.write(Published(position, 0, {}))
        publications.look()

    left = len(list((tmp_path / "_cdc" / "published" / "_delta_log").glob("*.json")))
    moments, positions = publications.moments()

    assert left < PUBLISHES
    assert set(positions.tolist()) == set(range(1, PUBLISHES + 1))
    assert moments.tolist() == sorted(moments.tolist())
