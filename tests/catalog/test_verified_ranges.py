"""What was compared: passes over tables, kept range by range."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, VerifiedRange

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def range_of(**said: Any) -> VerifiedRange:
    """A range of one table that is equal, and in all else as said."""
    plain: dict[str, Any] = {
        "sink": "lake",
        "topic": "public.t",
        "began": NOW,
        "rows": 10,
        "mismatched": 0,
        "position": 7,
        "verified_at": NOW,
    }
    return VerifiedRange(**{**plain, **said})


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with Catalog.open(f"sqlite:///{tmp_path}/catalog.db") as opened:
        yield opened


def later(seconds: int) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_a_table_is_verified_through_the_oldest_range_of_its_last_whole_pass(catalog: Catalog) -> None:
    verified = catalog.verified
    verified.record("p", range_of(number=0, ended="5", verified_at=later(1)))
    (table,) = verified.ls("p")
    assert (table.through, table.position, table.equal_at, table.ranges, table.ended) == (None, None, None, 1, False)
    verified.record("p", range_of(number=1, first="5", verified_at=later(9), position=8))
    (table,) = verified.ls("p")
    assert (table.through, table.position, table.rows) == (later(1), 7, 20)
    assert (table.equal_at, table.ranges, table.ended) == (later(9), 2, True)
    # the next pass says nothing of the whole before it has ended
    verified.record("p", range_of(began=later(60), number=0, ended="5", verified_at=later(61), mismatched=3))
    (table,) = verified.ls("p")
    assert (table.through, table.mismatched, table.ended) == (later(1), 3, False)
    verified.record("p", range_of(began=later(60), number=1, first="5", verified_at=later(62)))
    (table,) = verified.ls("p")
    assert (table.through, table.mismatched, table.equal_at) == (later(61), 3, later(9))


def test_a_range_that_is_compared_again_replaces_what_was_said_of_it(catalog: Catalog) -> None:
    catalog.verified.record("p", range_of(mismatched=4))
    catalog.verified.record("p", range_of(verified_at=later(5)))
    (table,) = catalog.verified.ls("p")
    assert (table.mismatched, table.through, table.equal_at) == (0, later(5), later(5))


def test_of_passes_that_ended_only_the_last_and_the_last_equal_one_stay(catalog: Catalog) -> None:
    for began, mismatched in ((0, 0), (10, 0), (20, 1), (30, 2)):
        catalog.verified.record("p", range_of(began=later(began), mismatched=mismatched))
    passes = catalog.verified.passes("p", "lake", "public.t")
    assert [ranges[0].began for ranges in passes] == [later(30), later(10)]
    catalog.verified.record("p", range_of(began=later(40)))
    assert len(catalog.verified.passes("p", "lake", "public.t")) == 1


def test_tables_sinks_and_pipelines_are_apart(catalog: Catalog) -> None:
    for pipeline, sink, topic in (
        ("p", "lake", "a.t"),
        ("p", "find", "a.t"),
        ("p", "lake", "a.u"),
        ("q", "lake", "a.t"),
    ):
        catalog.verified.record(pipeline, range_of(sink=sink, topic=topic))
    assert [(table.sink, table.topic) for table in catalog.verified.ls("p")] == [
        ("find", "a.t"),
        ("lake", "a.t"),
        ("lake", "a.u"),
    ]


def test_a_table_that_a_sink_no_longer_has_is_forgotten(catalog: Catalog) -> None:
    for sink, topic in (("lake", "a.t"), ("lake", "a.gone"), ("find", "a.gone")):
        catalog.verified.record("p", range_of(sink=sink, topic=topic, mismatched=1))
    catalog.verified.retain("p", "lake", ["a.t", "a.new"])
    assert [(table.sink, table.topic) for table in catalog.verified.ls("p")] == [("find", "a.gone"), ("lake", "a.t")]
