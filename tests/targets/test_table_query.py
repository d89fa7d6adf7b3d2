"""A query of the tables of a Delta sink: the wait for a position, the limit of rows, and values as JSON has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cdc.errors import ConfigError, PositionNotReached, UnknownName
from cdc.targets.table_query import QueriedSink, QueryRequest, find_delta_sink, query_tables
from tests.fixtures.one_table_lake import OneTableLake
from tests.service.pipeline import definition

IDS = "select id from orders order by id"


@pytest.fixture(name="lake")
def _lake(tmp_path: Path) -> OneTableLake:
    return OneTableLake(tmp_path)


def test_a_query_waits_for_the_first_cut_with_the_position(lake: OneTableLake) -> None:
    request = QueryRequest(sql=IDS, min_position="0/28", timeout=60)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(query_tables, QueriedSink(lake.definition), request)
        lake.publish(20, 40)
        answer = waiting.result()

    assert answer.rows == [[20], [40]]
    assert answer.cut is not None
    assert answer.cut.position == 40


def test_a_position_that_is_not_reached_in_time_is_an_error(lake: OneTableLake) -> None:
    request = QueryRequest(sql=IDS, min_position="0/28", timeout=0)
    with pytest.raises(PositionNotReached, match="has no cut yet"):
        query_tables(QueriedSink(lake.definition), request)
    lake.publish(20)
    with pytest.raises(PositionNotReached, match="is at 0/14: it did not reach 0/28"):
        query_tables(QueriedSink(lake.definition), request)


def test_a_past_cut_is_not_waited_for(lake: OneTableLake) -> None:
    with pytest.raises(ConfigError, match="cannot wait"):
        query_tables(QueriedSink(lake.definition), QueryRequest(sql=IDS, at="latest", min_position="0/28"))


@pytest.mark.parametrize(("limit", "rows", "more"), [(1, [[20]], True), (2, [[20], [40]], False)])
def test_rows_over_the_limit_are_left_out(lake: OneTableLake, limit: int, rows: list[list[int]], more: bool) -> None:
    lake.publish(20, 40)
    answer = query_tables(QueriedSink(lake.definition), QueryRequest(sql=IDS, limit=limit))

    assert (answer.rows, answer.more) == (rows, more)


def test_values_that_json_cannot_hold_are_text(lake: OneTableLake) -> None:
    lake.publish(20)
    sql = "select 1.50::decimal(9, 2), 'NaN'::double, 0.5::double, x'0aff', date '2026-01-02', null, true from orders"
    answer = query_tables(QueriedSink(lake.definition), QueryRequest(sql=sql))

    assert answer.rows == [["1.50", "NaN", 0.5, "\\x0aff", "2026-01-02", None, True]]


def test_values_inside_of_others_are_as_json_has_them_too(lake: OneTableLake) -> None:
    lake.publish(20)
    sql = """
        select 0.1::real, [0.1::real, null], [x'0a'], ['-Infinity'::double], named_struct('price', 1.50::decimal(9, 2)),
               0.0000000001::decimal(20, 10)
        from orders
    """
    answer = query_tables(QueriedSink(lake.definition), QueryRequest(sql=sql))

    nested = [[0.1, None], ["\\x0a"], ["-Infinity"], {"price": "1.50"}]
    assert answer.rows == [[0.1, *nested, "0.0000000001"]]


def test_a_sink_is_found_by_its_name(tmp_path: Path) -> None:
    shop = definition(tmp_path)

    assert find_delta_sink(shop, None) is find_delta_sink(shop, "lake")
    with pytest.raises(UnknownName) as found:
        find_delta_sink(shop, "find")
    assert "'lake'" in found.value.fix
