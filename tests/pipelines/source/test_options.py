"""Options of a frame and the filters that Spark pushes down."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import EqualTo, GreaterThan, GreaterThanOrEqual, In, LessThan, LessThanOrEqual, Not

from cdc.errors import InvalidDefinition, MalformedLsn, MalformedPosition
from cdc.log.file_selection import TableSelection
from cdc.position import Position
from cdc.table import matches
from pipelines.source.data_source import LogBatchReader
from pipelines.source.options import PushedFilters, SourceOptions, tables_option
from pipelines.source.read_tasks import Frame
from tests.log.rows import row
from tests.pipelines.source.frame_rows import commit, frame_of, frame_rows


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A log with commits at 10, 20 (two tables) and 30."""
    root = tmp_path / "log"
    for rows in (
        [row(10), row(10, 1)],
        [row(20), row(20, 1, relation=2, topic="sales.items")],
        [row(30, relation=2, topic="sales.items")],
    ):
        commit(root, rows[-1]["position"], *rows)
    return root


globs = st.lists(st.text("ab.*?[]!, ", min_size=1, max_size=8), min_size=1, max_size=3)


@given(globs, st.text("ab.[]!, ", max_size=8))
def test_globs_match_the_same_topics_after_a_round_trip(globs: list[str], topic: str) -> None:
    options = SourceOptions.from_options({"path": "log", "tables": tables_option(globs)})

    assert len(options.tables) == len(globs)
    assert matches(topic, options.tables) == matches(topic, globs)


def test_pushed_filters_exclude_only_rows_that_do_not_match(root: Path) -> None:
    rows = frame_rows(frame_of(root)).to_pylist()
    for filters, holds in (
        ([EqualTo(("position",), 20)], lambda r: r["position"] == 20),
        ([GreaterThan(("position",), 10), LessThan(("position",), 30)], lambda r: 10 < r["position"] < 30),
        ([GreaterThanOrEqual(("position",), 20), LessThanOrEqual(("position",), 20)], lambda r: r["position"] == 20),
        ([In(("relation",), (2, 5))], lambda r: r["relation"] in (2, 5)),
        ([EqualTo(("topic",), "sales.items")], lambda r: r["topic"] == "sales.items"),
        ([In(("topic",), ("a", "shop.orders")), EqualTo(("topic",), "a")], lambda r: r["topic"] == "a"),
        ([In(("relation",), (None, 2)), In(("topic",), (None, "sales.items"))], lambda r: r["relation"] == 2),
        ([In(("relation",), (None,))], lambda _: False),
        ([GreaterThan(("position",), 50)], lambda r: r["position"] > 50),
        ([LessThan(("position",), -5)], lambda r: r["position"] < -5),
        ([Not(EqualTo(("position",), 20)), EqualTo(("op",), "c"), EqualTo(("before", "x"), 1)], lambda _: True),
    ):
        reader = LogBatchReader(frame_of(root))
        assert list(reader.pushFilters(filters)) == filters
        read = [row for part in reader.partitions() for batch in reader.read(part) for row in batch.to_pylist()]
        assert [row for row in read if holds(row)] == [row for row in rows if holds(row)]
        if holds(rows[0]) is False:
            assert len(read) < len(rows)


def test_filters_of_other_columns_set_no_bound() -> None:
    pushed = PushedFilters.of([EqualTo(("op",), "c"), LessThan(("position",), 30), EqualTo(("topic",), "a.b")])

    assert pushed.within(Position(10), Position(40)) == (10, 29)
    assert pushed.narrowed(TableSelection()) == TableSelection(globs=("a.b",))
    assert pushed.narrowed(TableSelection(globs=("c.*",))) is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({}, InvalidDefinition),
        ({"path": "x", "maxRowsPerTrigger": "0"}, InvalidDefinition),
        ({"path": "x", "maxRowsPerTrigger": "many"}, InvalidDefinition),
        ({"path": "x", "maxRowsPerTrigger": "7", "maxBytesPerTrigger": "1k"}, InvalidDefinition),
        ({"path": "x", "maxBytesPerTrigger": "7"}, InvalidDefinition),
        ({"path": "x", "boundaries": "yes"}, InvalidDefinition),
        ({"path": "x", "history": "1"}, InvalidDefinition),
        ({"path": "x", "startingPosition": "12"}, MalformedLsn),
        ({"path": "x", "endingPosition": "earliest"}, MalformedLsn),
        ({"path": "x", "startingPosition": "x:0/1"}, MalformedPosition),
        ({"path": "x", "endingTimestamp": "yesterday"}, InvalidDefinition),
        ({"path": "x", "startingPosition": "latest", "startingTimestamp": "2026-01-01"}, InvalidDefinition),
        ({"path": "x", "startingPosition": "0/2", "endingPosition": "0/1"}, InvalidDefinition),
        ({"path": "x", "startingTimestamp": "2026-01-02", "endingTimestamp": "2026-01-01"}, InvalidDefinition),
        ({"path": "x", "table": "a.b", "tables": "a.*"}, InvalidDefinition),
        ({"path": "x", "table": "a.b", "types": "loose"}, InvalidDefinition),
        ({"path": "x", "types": "text"}, InvalidDefinition),
        ({"path": "x", "table": "a.b", "boundaries": "true"}, InvalidDefinition),
        ({"path": "x", "columns": " , "}, InvalidDefinition),
        ({"path": "x", "columns": "op, op"}, InvalidDefinition),
        ({"path": "x", "columns": "segment"}, InvalidDefinition),
    ],
)
def test_wrong_options_are_reported_by_name(options: dict[str, str], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        Frame.of(SourceOptions.from_options(options))
    if error is InvalidDefinition and len(options) == 2:
        assert repr(next(name for name in options if name != "path")) in str(caught.value)
