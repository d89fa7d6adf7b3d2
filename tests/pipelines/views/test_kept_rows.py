"""Rows of views that `keep` drops: the floor, which rows are before it, and a view whose old groups go away."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from cdc import failpoint
from cdc.errors import ViewColumnRefused
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.verification.views import compare_views
from pipelines.views.changed_rows import ROWS
from pipelines.views.kept_rows import check_time, floor_at, old_rows, without_old
from pipelines.views.log_of_views import Cut
from pipelines.views.view_columns import view_images, view_keys, view_schema
from tests.pipelines.views.shop_tables import TABLES
from tests.pipelines.views.view_pipeline import SOURCE, ViewPipeline

DAY: Final = 86_400_000_000
TIMES: Final = {
    pa.date32(): (date(2026, 1, 1), date(2026, 1, 2)),
    pa.timestamp("us"): (datetime(2026, 1, 1, 23, 59), datetime(2026, 1, 2)),  # noqa: DTZ001 - without a zone
    pa.timestamp("us", "UTC"): (datetime(2026, 1, 1, 23, 59, tzinfo=UTC), datetime(2026, 1, 2, tzinfo=UTC)),
}


def cut(days: float) -> Cut:
    return Cut(Position(1), int(days * DAY))


def schema_of(rows: pa.Table, *key: str) -> TableSchema:
    return view_schema(1, "shop.v", key, rows.schema)


def test_the_floor_follows_commit_times_in_steps_and_never_back() -> None:
    assert floor_at(cut(100.7), 90 * 86_400.0, None) == 10 * DAY
    assert floor_at(cut(101.2), 90 * 86_400.0, 10 * DAY) == 11 * DAY
    assert floor_at(cut(50), 90 * 86_400.0, 11 * DAY) == 11 * DAY
    assert floor_at(Cut(Position(1), 0), 90 * 86_400.0, 11 * DAY) == 11 * DAY
    assert floor_at(cut(100.76), 86_400.0, None) == int(99.7 * DAY)
    assert floor_at(cut(100), None, None) is None


@pytest.mark.parametrize("kind", TIMES, ids=str)
def test_rows_before_the_floor_are_old(kind: pa.DataType) -> None:
    rows = pa.table({"n": pa.array([1, 1]), "at": pa.array(TIMES[kind], kind)})
    schema, floor = schema_of(rows, "n", "at"), int(datetime(2026, 1, 2, tzinfo=UTC).timestamp() * 1_000_000)
    state = pa.table({"key": view_keys(rows, schema), "after": view_images(rows, schema)}, schema=ROWS)

    check_time(schema)
    assert without_old(rows, schema, floor)["at"].to_pylist() == [TIMES[kind][1]]
    assert without_old(rows, schema, None) == rows
    assert old_rows(state, schema, floor) == state.slice(0, 1)


def test_the_key_has_one_time() -> None:
    rows = pa.table({"n": [1], "one": pa.array([0], pa.date32()), "other": pa.array([0], pa.timestamp("us"))})

    with pytest.raises(ViewColumnRefused, match=r"its key \(n\) has no columns of type date or timestamp"):
        check_time(schema_of(rows, "n"))
    with pytest.raises(ViewColumnRefused, match=r"its key \(one, other\) has 2 columns"):
        check_time(schema_of(rows, "one", "other"))


BY_DAY: Final[dict[str, Any]] = {
    "name": "shop.v_days",
    "key": ["day"],
    "sql": "SELECT day, count(*) AS orders FROM shop.orders WHERE day IS NOT NULL GROUP BY day",
    "keep": "10d",
}


class Days(ViewPipeline):
    """Orders of days in January 2026, with the view BY_DAY."""

    def __init__(self, folder: Path, spark: SparkSession) -> None:
        super().__init__(folder, spark.newSession(), TABLES.values(), [BY_DAY])

    def order(self, *days: int) -> None:
        """Commit an order of each of these days."""
        for day in days:
            key = str(len(self.tables["shop.orders"]))
            self.write(("shop.orders", "c", (key, "1", "new", f"2026-01-{day:02}")))

    def at(self, day: int) -> None:
        """Let the next transactions commit on another day."""
        self.committed_at = int(datetime(2026, 1, day, 12, tzinfo=UTC).timestamp() * 1_000_000)

    def logged(self) -> list[tuple[str, str]]:
        """Operation and key of the last changes of the view."""
        return [(row["op"], row["key"][0]) for row in self.changes("shop.v_days") if row["key"]]


@pytest.fixture(name="days")
def _days(tmp_path: Path, spark: SparkSession, with_delta: None) -> Iterator[Days]:
    days = Days(tmp_path / "shop", spark)
    days.at(12)
    days.order(1, 2, 3, 4, 12)
    days.compute()
    yield days
    days.close()


@pytest.mark.slow
def test_old_groups_are_deleted_once_and_do_not_come_back(days: Days, spark: SparkSession) -> None:
    assert sorted(days.logged()) == [("r", f"2026-01-{day:02}") for day in (2, 3, 4, 12)]

    days.at(13)
    days.order(13)  # what became old goes with any change
    days.compute()
    assert days.logged() == [("d", "2026-01-02"), ("c", "2026-01-13")]
    (verdict,) = compare_views(days.definition, (), lambda: spark, 5)
    assert (verdict.equal, verdict.rows) == (True, 4)
    days.order(2, 1)  # old groups change
    days.compute()
    assert days.logged() == []

    days.at(5)  # a clock that was set back
    days.order(2)
    days.engine.refresh("shop.v_days")
    days.compute()
    assert days.logged() == []


@pytest.mark.slow
def test_a_deletion_that_was_cut_off_is_repeated_once(days: Days, monkeypatch: pytest.MonkeyPatch) -> None:
    days.at(13)
    days.write(("shop.customers", "c", ("1", "Ada")))  # no table of the view changes
    record = days.publish()
    for point in ("view_rows_added", "views_staged", "views_committed"):
        monkeypatch.setenv(failpoint.VARIABLE, f"{point}:1:abandon")
        with pytest.raises(failpoint.Abandoned):
            days.engine.advance(record, SOURCE)
        monkeypatch.delenv(failpoint.VARIABLE)
        days.reopen()
    assert days.logged() == [("d", "2026-01-02")]

    days.reopen(days.define([BY_DAY | {"keep": "30d"}]))
    days.order(2)
    days.compute()
    assert days.rows("shop.v_days") == {
        ("2026-01-01", "1"),
        ("2026-01-02", "2"),
        ("2026-01-03", "1"),
        ("2026-01-04", "1"),
        ("2026-01-12", "1"),
    }
