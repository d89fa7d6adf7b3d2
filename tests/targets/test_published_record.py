"""Published record of a sink: JSON and versions."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from cdc.targets.published_record import RECORD_FORMAT, Published, TableRecord


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


def test_the_json_of_a_record_has_sorted_keys_and_may_be_without_schemas():
    orders = replace(record(7, "shop.ü"), reason='a "b"\n', schema='{"name": "ü"}', parked=(("1", "x"), ("2", "y")))
    published = Published(20, 5, {9: record(9, "shop.items"), 7: orders})
    tables = [asdict(orders), asdict(published.tables[9])]
    expected = {"format": RECORD_FORMAT, "position": 20, "committed_at": 5, "tables": tables}

    assert published.to_json() == json.dumps(expected, sort_keys=True, ensure_ascii=False)
    tables[0]["schema"] = None
    assert published.to_json(with_schemas=False) == json.dumps(expected, sort_keys=True, ensure_ascii=False)
    moved = Published(21, 5, {7: replace(orders, position=21)})
    assert Published.from_json(moved.to_json()) == moved


def test_a_record_of_a_newer_format_is_refused():
    with pytest.raises(ValueError, match="format"):
        Published.from_json('{"format": 2}')
