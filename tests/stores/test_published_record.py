"""Published record of a sink: JSON and versions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cdc.stores.published_record import Published, TableRecord


def record(relation: int, topic: str) -> TableRecord:
    return TableRecord(relation, topic, f"/lake/{topic}", 20, 1, "streaming")


def test_tables_that_share_a_target_are_read_at_the_newest_version_that_a_cut_lists():
    shared = [
        replace(record(n, f"shop.part{n}"), target="/lake/all", version=version) for n, version in [(1, 9), (2, 7)]
    ]

    assert Published(20, 5, {table.relation: table for table in shared}).versions == {"/lake/all": 9}


def test_a_record_survives_its_json():
    published = Published(20, 5, {7: replace(record(7, "shop.orders"), version=None, reason="CDC-3001 x")})

    assert Published.from_json(published.to_json()) == published


def test_a_record_of_a_newer_format_is_refused():
    with pytest.raises(ValueError, match="format"):
        Published.from_json('{"format": 2}')
