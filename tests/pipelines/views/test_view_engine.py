"""Views over a real lake in a real Spark: each is its SQL over the tables, and only real differences are logged.

Spark interprets the queries; in test_random_joins.py it compiles them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any, Final

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc import failpoint
from cdc.table import TableState
from cdc.targets.published_record import Published
from pipelines.views.view_computation import ComputationLimits
from tests.fixtures.waiting import until
from tests.pipelines.views.shop_tables import ITEMS, ORDERS, TABLES
from tests.pipelines.views.view_pipeline import SOURCE, Values, ViewPipeline

pytestmark = pytest.mark.usefixtures("with_delta")

TOTALS: Final[dict[str, Any]] = {
    "name": "shop.v_totals",
    "key": ["order_id"],
    "sql": "SELECT o.id AS order_id, c.name AS customer, o.status, count(i.id) AS items,"
    " sum(i.quantity * i.price) AS total FROM shop.orders o JOIN shop.customers c ON c.id = o.customer_id"
    " LEFT JOIN shop.items i ON i.order_id = o.id"
    " GROUP BY o.id, c.name, o.status",
}
BY_DAY: Final[dict[str, Any]] = {
    "name": "shop.v_days",
    "key": ["day"],
    "sql": "SELECT o.day, count(DISTINCT o.id) AS orders, sum(i.quantity) AS quantity FROM shop.orders o"
    " JOIN shop.items i ON i.order_id = o.id WHERE o.day IS NOT NULL GROUP BY o.day",
}
LARGE: Final[dict[str, Any]] = {
    "name": "shop.v_large",
    "key": ["customer"],
    "sql": "SELECT t.customer, count(*) AS orders, max(t.total) AS most FROM shop.v_totals t WHERE t.items > 1"
    " GROUP BY t.customer",
}
"""A view over TOTALS."""
RANKS: Final[dict[str, Any]] = {
    "name": "shop.v_ranks",
    "key": ["id"],
    "sql": "SELECT id, row_number() OVER (ORDER BY name, id) AS rank FROM shop.customers",
    "refresh": {"every": "1h"},
}


@contextmanager
def opened(folder: Path, spark: SparkSession, *views: dict[str, Any]) -> Iterator[ViewPipeline]:
    shop = ViewPipeline(folder, spark.newSession(), TABLES.values(), views)
    try:
        yield shop
    finally:
        shop.close()


def filled(shop: ViewPipeline) -> None:
    shop.write(
        ("shop.customers", "c", ("1", "Ada")),
        ("shop.customers", "c", ("2", "Bob")),
        *(("shop.orders", "c", (str(n), str(1 + n % 2), "new", "2026-01-0" + str(1 + n % 3))) for n in range(6)),
        *(("shop.items", "c", (str(n), str(n % 5), f"sku{n}", str(n + 1), "2.50")) for n in range(12)),
    )


def expected(shop: ViewPipeline, view: dict[str, Any]) -> set[tuple[str | None, ...]]:
    """What Spark makes of the SQL over the rows that the source has."""
    session, sql = shop._session, str(view["sql"])
    for topic, schema in TABLES.items():
        columns = ", ".join(f"{c.name} STRING" for c in schema.columns)
        types = {"integer": "INT", "numeric": "DECIMAL(10,2)", "date": "DATE", "text": "STRING"}
        casts = [f"CAST({c.name} AS {types[c.type_name]}) AS {c.name}" for c in schema.columns]
        rows = session.createDataFrame(list(shop.tables[topic].values()), columns)
        rows.selectExpr(*casts).createOrReplaceTempView(f"expected_{schema.name}")
        sql = sql.replace(topic, f"expected_{schema.name}")
    return {tuple(None if v is None else str(v) for v in row) for row in session.sql(sql).collect()}


def operations(shop: ViewPipeline, view: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(row["op"], row["key"] and row["key"][0]) for row in shop.changes(view["name"])]


def test_a_view_is_built_and_then_follows_the_changes_of_all_its_tables(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        filled(shop)
        shop.compute()
        assert [op for op, _ in operations(shop, TOTALS)] == ["s", *["r"] * 6, "g"]

        shop.write(("shop.items", "u", ("1", "1", "sku1", "5", "2.50")))
        shop.compute()
        assert operations(shop, TOTALS) == [("u", "1")]
        shop.write(("shop.customers", "u", ("2", "Bo")))  # orders 1, 3 and 5
        shop.compute()
        assert operations(shop, TOTALS) == [("u", "1"), ("u", "3"), ("u", "5")]
        figures = shop.engine.figures["shop.v_totals"]
        work = figures.work
        assert (work.mode, work.input_rows, work.affected_keys, figures.changed_rows) == (
            "incremental",
            1,
            3,
            3,
        )
        assert work.seconds > 0
        assert operations(shop, BY_DAY) == []
        shop.write(("shop.items", "u", ("2", "4", "sku2", "3", "2.50")), ("shop.orders", "d", ("3",)))
        shop.compute()
        assert operations(shop, TOTALS) == [("d", "3"), ("u", "2"), ("u", "4")]
        for view in (TOTALS, BY_DAY):
            assert shop.rows(view["name"]) == expected(shop, view)
        shop.write(("shop.items", "t", ("",)))
        shop.compute()
        for view in (TOTALS, BY_DAY):
            assert shop.rows(view["name"]) == expected(shop, view)


@pytest.mark.slow
def test_a_view_of_a_table_whose_columns_exchanged_their_names_says_so(tmp_path: Path, spark: SparkSession) -> None:
    view = {"name": "shop.v_items", "key": ["id"], "sql": "SELECT id, sku AS public, order_id FROM shop.items"}
    with opened(tmp_path / "shop", spark, view) as shop:
        filled(shop)
        shop.compute()
        assert shop.views.schemas()["shop.v_items"].former_names == ()
        names = {"quantity": "order_id", "order_id": "quantity"}
        columns = tuple(replace(column, name=names.get(column.name, column.name)) for column in ITEMS.columns)
        shop.alter(replace(ITEMS, columns=columns).following(ITEMS), shop.tables["shop.items"])
        shop.compute()

        schema = shop.views.schemas()["shop.v_items"]
        assert {(1, "public"), (2, "order_id"), (3, "public")} <= set(schema.former_names)
        rows = {(row[0], row[2], row[3]) for row in shop.tables["shop.items"].values()}
        assert shop.rows("shop.v_items") == rows
        shop.compute()
        assert operations(shop, view) == []


def test_a_view_over_a_view_follows_the_tables_of_both(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, LARGE) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.items", "u", ("1", "1", "sku1", "500", "2.50")))
        shop.compute()
        assert operations(shop, LARGE) == [("u", "Bob")]
        sql = LARGE["sql"].replace("shop.v_totals", f"({TOTALS['sql']})")
        assert shop.rows("shop.v_large") == expected(shop, {"sql": sql})


@pytest.mark.slow
def test_a_change_that_no_row_shows_is_not_logged(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.orders", "u", ("1", "2", "new", "2026-03-01")))
        shop.compute()
        assert operations(shop, TOTALS) == []
        assert shop.engine.figures["shop.v_totals"].work.affected_keys == 1


@pytest.mark.slow
def test_many_keys_are_computed_in_slices(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        slices: list[tuple[int, int | None]] = []
        shop.engine.limits = ComputationLimits(keys_at_once=2)
        shop.engine.on_slice = lambda _, work: slices.append((work.affected_keys, work.keys_left))
        shop.write(("shop.customers", "u", ("1", "A")), ("shop.customers", "u", ("2", "B")))
        shop.compute()
        assert slices == [(2, 4), (4, 2), (6, 0)]
        assert len(operations(shop, TOTALS)) == 6
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)


def caught_up(shop: ViewPipeline, record: Published, *views: dict[str, Any]) -> None:
    """Compute at a cut until the views are there, without another change."""
    while any(shop.engine.figures[view["name"]].position < record.position for view in views):
        until(lambda: shop.engine.is_due(record), "a computation that has ended", every=0.01)
        assert shop.engine.advance(record, SOURCE)
        assert shop.engine.cuts_in_use >= {record.position}
    for view in views:
        assert shop.rows(view["name"]) == expected(shop, view)


@contextmanager
def held_back(shop: ViewPipeline, view: str) -> Iterator[None]:
    """Let no slice of a view go on until the block ends, however long that takes."""
    goes_on = Event()
    shop.engine.on_slice = lambda computed, _: computed == view and goes_on.wait()  # type: ignore[assignment, return-value]
    try:
        yield
    finally:
        goes_on.set()


def test_other_views_go_on_while_the_computation_of_one_takes_long(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        filled(shop)
        shop.compute()
        before, began = shop.rows("shop.v_totals"), shop.engine.oldest_cut
        with held_back(shop, "shop.v_totals"):
            shop.engine.limits, shop.engine.patience = ComputationLimits(keys_at_once=2), 0.0
            shop.write(("shop.customers", "u", ("1", "A")), ("shop.customers", "u", ("2", "B")))
            shop.engine.advance(shop.publish(), SOURCE)
            for quantity in ("30", "40"):
                shop.write(
                    ("shop.items", "u", ("1", "1", "sku1", quantity, "2.50")), ("shop.orders", "d", (quantity[0],))
                )
                record = shop.publish()
                shop.engine.advance(record, SOURCE)
                caught_up(shop, record, BY_DAY)
                assert shop.rows("shop.v_totals") == before
            figures = shop.engine.figures["shop.v_totals"]
            assert (figures.state, figures.work.mode) == ("behind", "")
            assert shop.engine.oldest_cut == figures.position == began < shop.views.computed_from.cut
            assert began in shop.engine.cuts_in_use

        caught_up(shop, record, BY_DAY, TOTALS)
        assert shop.views.computed_from.cut == record.position < shop.views.position < record.position + 8
        assert {figures.state for figures in shop.engine.figures.values()} == {"live"}
        assert shop.engine.cuts_in_use == {record.position}


@pytest.mark.slow
def test_a_long_first_build_is_behind_other_views_and_then_follows(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, BY_DAY) as shop:
        filled(shop)
        shop.compute()
        shop.reopen(shop.define([BY_DAY, TOTALS]))
        shop.engine.patience = 0.0
        shop.engine.advance(record := shop.publish(), SOURCE)  # a new view needs no further change
        assert "shop.v_totals" not in shop.views.schemas()
        figures = shop.engine.figures["shop.v_totals"]
        assert (figures.state, figures.work.keys_left, figures.work.seconds_left) == ("behind", None, None)
        assert re.match(r"the whole view is computed since \d\d:\d\d:\d\d UTC", figures.reason)
        began = record.position
        shop.write(("shop.customers", "u", ("2", "B")), ("shop.items", "d", ("3",)))
        shop.engine.advance(record := shop.publish(), SOURCE)
        assert shop.engine.oldest_cut == began  # its changes since then are still to be read
        caught_up(shop, record, BY_DAY, TOTALS)


def test_executors_build_a_large_view(tmp_path: Path, spark: SparkSession) -> None:
    twice = {"name": "shop.v_skus", "key": ["order_id"], "sql": "SELECT order_id, sku FROM shop.items"}
    with opened(tmp_path / "shop", spark, TOTALS, twice) as shop:
        shop.engine.limits = ComputationLimits(large=1)
        filled(shop)
        shop.compute()
        assert [op for op, _ in operations(shop, TOTALS)] == ["s", *["r"] * 6, "g"]
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)
        assert "more than one row with the key (order_id)" in shop.engine.figures["shop.v_skus"].reason
        assert not list((tmp_path / "shop/log/derived/_builds").iterdir())
        shop.write(("shop.items", "u", ("1", "1", "sku1", "5", "2.50")))
        shop.compute()
        assert operations(shop, TOTALS) == [("u", "1")]


def test_executors_compute_the_differences_of_a_large_view_also_after_a_crash(
    tmp_path: Path, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = ComputationLimits(large=1, keys=0)
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.items", "u", ("1", "1", "sku1", "5", "2.50")), ("shop.items", "d", ("3",)))
        record = shop.publish()
        shop.engine.limits = large
        monkeypatch.setenv(failpoint.VARIABLE, "view_rows_added:1:abandon")  # executors have written the files
        with pytest.raises(failpoint.Abandoned):
            shop.engine.advance(record, SOURCE)
        monkeypatch.delenv(failpoint.VARIABLE)
        shop.reopen()
        shop.engine.limits = large
        shop.compute()
        work = shop.engine.figures["shop.v_totals"].work
        assert (work.mode, work.affected_keys, work.keys_left) == ("incremental", 2, 0)
        assert operations(shop, TOTALS) == [("u", "1"), ("u", "3")]
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)

        shop.write(("shop.items", "u", ("1", "1", "sku1", "6", "2.50")), ("shop.orders", "d", ("2",)))
        shop.engine.refresh("shop.v_totals")
        shop.compute()
        assert shop.engine.figures["shop.v_totals"].work.mode == "whole"
        assert operations(shop, TOTALS) == [("d", "2"), ("u", "1")]
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)


@pytest.mark.slow
def test_a_view_that_is_behind_continues_after_a_restart(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.engine.patience = 0.0
        shop.write(("shop.customers", "u", ("2", "B")))
        shop.engine.advance(shop.publish(), SOURCE)
        shop.write(("shop.items", "d", ("3",)))
        record = shop.publish()
        running = shop.engine._views["shop.v_totals"].running
        assert running is not None
        until(running.has_ended, "a result", every=0.01)
        shop.engine.advance(record, SOURCE)
        figures = shop.engine.figures["shop.v_totals"]
        assert (figures.state, figures.changed_rows) == ("behind", 3)
        assert figures.position < record.position == shop.views.computed_from.cut
        shop.reopen()
        assert shop.engine.is_due(record)
        assert shop.engine.oldest_cut == figures.position
        shop.engine.advance(record, SOURCE)
        assert (shop.engine.figures["shop.v_totals"].work.mode, len(operations(shop, TOTALS))) == ("incremental", 1)
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)
        assert not shop.engine.is_due(record)


@pytest.mark.slow
def test_a_long_computation_ends_when_its_view_is_paused_or_the_process_ends(
    tmp_path: Path, spark: SparkSession
) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        before = shop.rows("shop.v_totals")
        shop.engine.limits, shop.engine.patience = ComputationLimits(keys_at_once=1), 0.0
        for name in ("A", "B"):
            shop.write(("shop.customers", "u", ("2", name)))
            shop.engine.advance(shop.publish(), SOURCE)
            assert shop.engine._views["shop.v_totals"].running is not None
            shop.engine.paused = frozenset({"shop.v_totals"})
            shop.write(("shop.customers", "u", ("1", name)))
            shop.engine.advance(shop.publish(), SOURCE)
            assert shop.engine._views["shop.v_totals"].running is None
            assert shop.rows("shop.v_totals") == before
            shop.engine.paused = frozenset()
        shop.write(("shop.items", "d", ("3",)))
        shop.engine.advance(record := shop.publish(), SOURCE)
        shop.reopen()
        shop.engine.advance(record, SOURCE)
        caught_up(shop, record, TOTALS)


@pytest.mark.slow
def test_a_paused_view_stays_as_it_is_and_then_gets_all_differences(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        filled(shop)
        shop.compute()
        before = shop.rows("shop.v_totals")
        shop.engine.paused = frozenset({"shop.v_totals"})
        for name, quantity in (("Bo", "5"), ("Bob", "2")):
            shop.write(("shop.customers", "u", ("2", name)))
            shop.write(("shop.items", "u", ("1", "1", "sku1", quantity, "2.50")))
            shop.compute()
            assert shop.rows("shop.v_totals") == before
            assert shop.rows("shop.v_days") == expected(shop, BY_DAY)
        figures = shop.engine.figures["shop.v_totals"]
        assert (figures.state, figures.work.mode, figures.position < shop.views.position) == ("paused", "", True)
        shop.reopen()
        shop.write(("shop.orders", "u", ("1", "2", "paid", None)))
        shop.compute()
        assert operations(shop, TOTALS) == [("u", "1")]
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)
        figures = shop.engine.figures["shop.v_totals"]
        assert (figures.state, figures.work.mode, figures.position) == ("live", "incremental", shop.views.position)


@pytest.mark.slow
def test_other_sql_builds_the_view_again(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        other = TOTALS | {"sql": "SELECT id AS order_id, status, day FROM shop.orders"}
        shop.reopen(shop.define([other]))
        shop.write(("shop.orders", "u", ("1", "2", "paid", "2026-03-01")))
        shop.compute()
        assert [op for op, _ in operations(shop, other)] == ["s", *["r"] * 6, "g"]
        assert shop.rows("shop.v_totals") == expected(shop, other)
        ids = {column.name: column.id for column in shop.views.schemas()["shop.v_totals"].columns}
        assert ids == {"order_id": 1, "status": 3, "day": 6}


@pytest.mark.slow
def test_a_view_that_fails_stops_alone_and_comes_back(tmp_path: Path, spark: SparkSession) -> None:
    many = {"name": "shop.v_skus", "key": ["order_id"], "sql": "SELECT order_id, sku FROM shop.items"}
    with opened(tmp_path / "shop", spark, many, TOTALS) as shop:
        shop.write(("shop.items", "c", ("1", "1", "a", "1", "1.00")))
        shop.compute()
        shop.write(("shop.items", "c", ("2", "1", "b", "1", "1.00")), ("shop.customers", "c", ("1", "Ada")))
        shop.write(("shop.orders", "c", ("1", "1", "new", None)))
        shop.compute()
        assert shop.views.schemas()["shop.v_skus"].state is TableState.NEEDS_RESYNC
        assert "more than one row with the key (order_id) = ['1']" in shop.engine.figures["shop.v_skus"].reason
        assert operations(shop, many) == [("s", None)]
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)

        shop.write(("shop.items", "d", ("2",)))
        shop.engine.refresh("shop.v_skus")
        shop.compute()
        assert shop.views.schemas()["shop.v_skus"].state is TableState.LIVE
        assert shop.rows("shop.v_skus") == expected(shop, many)
        shop.write(("shop.items", "u", ("1", "1", "c", "1", "1.00")))
        shop.compute()
        assert shop.engine.figures["shop.v_skus"].work.affected_keys == 1


def test_a_view_whose_result_may_differ_each_time_stops_alone(tmp_path: Path, spark: SparkSession) -> None:
    days = {"name": "shop.v_late", "key": ["id"], "sql": "SELECT id FROM shop.orders WHERE day < lower('TODAY')"}
    sums = {
        "name": "shop.v_sums",
        "key": ["sku"],
        "sql": "SELECT sku, sum(CAST(price AS DOUBLE)) AS x FROM shop.items WHERE sku IS NOT NULL GROUP BY sku",
    }
    names = {"name": "shop.v_names", "key": ["id"], "sql": "SELECT id, name FROM shop.customers"}
    with opened(tmp_path / "shop", spark, days, sums, names) as shop:
        filled(shop)
        shop.compute()
        figures = shop.engine.figures
        assert [figures[name].state for name in ("shop.v_late", "shop.v_sums", "shop.v_names")] == [
            "failed",
            "failed",
            "live",
        ]
        assert figures["shop.v_late"].reason.startswith("CDC-8002 view 'shop.v_late' converts a text such as 'today'")
        assert figures["shop.v_sums"].reason.startswith("CDC-8004 view 'shop.v_sums': the result of sum over floating")


def test_a_failed_view_stays_failed_while_it_is_tried_again(tmp_path: Path, spark: SparkSession) -> None:
    sums = {"name": "shop.v_sums", "key": ["x"], "sql": "SELECT sum(CAST(price AS DOUBLE)) AS x FROM shop.items"}
    with opened(tmp_path / "shop", spark, sums) as shop:
        shop.write(("shop.items", "c", ("1", "1", "a", "1", "1.00")))
        shop.compute()
        figures = shop.engine.figures["shop.v_sums"]
        reason = figures.reason
        failure = shop.engine._views["shop.v_sums"].failure
        assert failure is not None
        failure.due = 0.0
        shop.engine.patience = 0.0
        shop.write(("shop.items", "c", ("2", "1", "b", "1", "1.00")))
        shop.engine.advance(record := shop.publish(), SOURCE)
        assert (figures.state, figures.reason) == ("failed", reason)
        until(lambda: shop.engine.is_due(record), "a computation that has ended", every=0.01)
        shop.engine.advance(record, SOURCE)
        assert (figures.state, figures.reason) == ("failed", reason)


@pytest.mark.slow
def test_sql_that_only_allows_it_is_computed_as_a_whole_when_due(tmp_path: Path, spark: SparkSession) -> None:
    with opened(tmp_path / "shop", spark, RANKS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.customers", "u", ("2", "Aaron")))
        shop.compute()
        assert operations(shop, RANKS) == []
        position = shop.engine.figures["shop.v_ranks"].position
        shop.engine.refresh("shop.v_ranks")
        shop.write(("shop.customers", "c", ("3", "Zoe")))
        shop.compute()
        assert operations(shop, RANKS) == [("u", "1"), ("u", "2"), ("c", "3")]
        assert shop.engine.figures["shop.v_ranks"].position > position
        assert shop.rows("shop.v_ranks") == expected(shop, RANKS)


@pytest.mark.slow
@pytest.mark.parametrize("point", ["view_rows_added", "views_staged", "views_committed"])
def test_a_computation_that_was_cut_off_is_repeated_once(
    tmp_path: Path, spark: SparkSession, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path / "shop", spark, TOTALS) as shop:
        filled(shop)
        shop.compute()
        shop.write(("shop.customers", "u", ("2", "Bo")))
        record = shop.publish()
        monkeypatch.setenv(failpoint.VARIABLE, f"{point}:1:abandon")
        with pytest.raises(failpoint.Abandoned):
            shop.engine.advance(record, SOURCE)
        monkeypatch.delenv(failpoint.VARIABLE)
        shop.reopen()
        shop.write(("shop.items", "u", ("1", "1", "sku1", "5", "2.50")))
        shop.compute()
        assert shop.rows("shop.v_totals") == expected(shop, TOTALS)


@pytest.mark.slow
@pytest.mark.parametrize("removed", ["files", "versions"])
@pytest.mark.parametrize("keys_at_once", [1, 100])
def test_a_view_is_computed_as_a_whole_when_old_rows_of_its_tables_were_removed(
    tmp_path: Path, spark: SparkSession, removed: str, keys_at_once: int
) -> None:
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        filled(shop)
        shop.compute()
        shop.write(*(("shop.orders", "u", (str(n), "1", "paid", None)) for n in range(6)))
        shop.write(*(("shop.items", "u", (str(n), str(n % 5), f"sku{n}", "9", "1.00")) for n in range(12)))
        record = shop.publish()
        shop.reopen()
        shop.engine.limits = ComputationLimits(keys_at_once=keys_at_once)
        for table in record.tables.values():
            remove_old(Path(table.target), versions=removed == "versions")
        assert shop.engine.advance(record, SOURCE)
        assert {shop.engine.figures[view["name"]].work.mode for view in (TOTALS, BY_DAY)} == {"whole"}
        assert len(operations(shop, TOTALS)) == 6
        for view in (TOTALS, BY_DAY):
            assert shop.rows(view["name"]) == expected(shop, view)
        shop.write(("shop.items", "u", ("1", "1", "sku1", "5", "2.50")))
        shop.compute()
        assert shop.engine.figures["shop.v_totals"].work.mode == "incremental"


def remove_old(target: Path, *, versions: bool) -> None:
    """Remove the data files that the latest version of a table does not have, or also the versions before it."""
    table = DeltaTable(target)
    live = {Path(uri).name for uri in table.file_uris()}
    for file in target.glob("*.parquet"):
        if file.name not in live:
            file.unlink()
    if versions:
        table.create_checkpoint()
        for file in target.glob("_delta_log/*.json"):
            if int(file.stem) < table.version():
                file.unlink()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_random_changes_during_long_computations(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    chance = random.Random(seed)
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        shop.engine.patience = 0.0
        for _ in range(12):
            for _ in range(chance.randint(1, 4)):
                shop.write(*(change(chance, shop) for _ in range(chance.randint(1, 4))))
                record = shop.publish()
                if chance.random() < 0.7:
                    shop.engine.advance(record, SOURCE)
            if chance.random() < 0.2:
                shop.reopen()
            sizes = {"keys": chance.choice([0, 2, 100]), "large": chance.choice([1, 100])}
            shop.engine.limits = ComputationLimits(keys_at_once=chance.randint(1, 3), **sizes)
            shop.engine.patience = chance.choice([0.0, 0.5])
            if chance.random() < 0.5:
                caught_up(shop, record, TOTALS, BY_DAY)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_random_changes(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    chance = random.Random(seed)
    with opened(tmp_path / "shop", spark, TOTALS, BY_DAY) as shop:
        for _ in range(12):
            for _ in range(chance.randint(1, 4)):
                shop.write(*(change(chance, shop) for _ in range(chance.randint(1, 4))))
            before = {view["name"]: shop.rows(view["name"]) for view in (TOTALS, BY_DAY) if shop.views.position}
            shop.compute()
            if chance.random() < 0.2:
                shop.reopen()
            for view in (TOTALS, BY_DAY):
                assert shop.rows(view["name"]) == expected(shop, view)
                if view["name"] in before:
                    changed = before[view["name"]] ^ shop.rows(view["name"])
                    assert len(operations(shop, view)) == len({row[0] for row in changed})


def change(chance: random.Random, shop: ViewPipeline) -> tuple[str, str, Values]:
    topic = chance.choice([*TABLES, ITEMS.topic, ORDERS.topic])
    known, key = shop.tables[topic], str(chance.randint(0, 8))
    if chance.random() < 0.02:
        return topic, "t", ("",)
    if (key,) in known and chance.random() < 0.3:
        return topic, "d", (key,)
    small = str(chance.randint(0, 5))
    values: dict[str, Values] = {
        "shop.customers": (key, chance.choice(["Ada", "Bob", None])),
        "shop.orders": (key, chance.choice([small, None]), "new", chance.choice([None, f"2026-01-0{small}"[:9] + "1"])),
        "shop.items": (key, chance.choice([small, small, None]), f"sku{small}", small, f"{small}.25"),
    }
    return topic, "u" if (key,) in known else "c", values[topic]
