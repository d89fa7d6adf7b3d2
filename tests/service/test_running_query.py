"""A query of the server in a process of its own: its answer, its errors, and its limits."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cdc.errors import ChildFailed, CutUnavailable, QueryNotReadOnly, QueryStopped
from cdc.service.running_query import QueryProcesses, RunningQuery
from cdc.service.warm_process import ForkedProcess, WarmProcess
from cdc.targets.table_query import QueriedSink, QueryRequest
from tests.fixtures.one_table_lake import OneTableLake
from tests.fixtures.waiting import until


@pytest.fixture(name="lake", scope="module")
def _lake(tmp_path_factory: pytest.TempPathFactory) -> OneTableLake:
    lake = OneTableLake(tmp_path_factory.mktemp("lake"))
    lake.publish(20)
    return lake


@pytest.fixture(name="processes", scope="module")
def _processes() -> Iterator[QueryProcesses]:
    processes = QueryProcesses()
    yield processes
    processes.stop()


def answer(running: RunningQuery) -> dict[str, Any]:
    try:
        return until(running.answer, "the answer", every=0.01)
    finally:
        running.close()


def query(processes: QueryProcesses, lake: OneTableLake, sql: str, **given: Any) -> dict[str, Any]:
    return answer(processes.start(QueriedSink(lake.definition), QueryRequest(sql=sql, **given)))


def test_an_answer_comes_as_json_values(processes: QueryProcesses, lake: OneTableLake) -> None:
    found = query(processes, lake, "select id, 0.1::decimal(9, 2) as price from orders")

    assert (found["columns"], found["rows"]) == (["id", "price"], [[20, "0.10"]])


def test_an_error_has_the_class_that_it_has_in_the_process(processes: QueryProcesses, lake: OneTableLake) -> None:
    with pytest.raises(QueryNotReadOnly, match="'DROP'"):
        query(processes, lake, "drop table orders")
    with pytest.raises(CutUnavailable, match="the oldest cut is 0/14"):
        query(processes, lake, "select 1", at="0/13")


def test_a_query_that_needs_too_much_memory_is_stopped(processes: QueryProcesses, lake: OneTableLake) -> None:
    with pytest.raises(QueryStopped, match="memory"):
        query(processes, lake, "select array_agg(n || repeat('x', 1000)) from (select unnest(range(0, 10000000)) as n)")


def test_a_long_answer_is_refused(processes: QueryProcesses, lake: OneTableLake) -> None:
    with pytest.raises(QueryStopped, match="the answer of the query has 100,0"):
        query(processes, lake, "select repeat('x', 100000) from (select unnest(range(0, 1000)))")


def fork(warm: WarmProcess, code: str) -> ForkedProcess:
    return warm.fork((sys.executable, "-u", "-m", "tests.run_code", code), ())


def test_a_query_that_does_not_end_is_stopped() -> None:
    with WarmProcess() as warm:
        process = fork(warm, "import signal; signal.pause()")
        with pytest.raises(QueryStopped, match=r"did not end within 0\.5 s"):
            answer(RunningQuery(process, 0.5))
        assert process.returncode == -9


def test_a_process_that_fails_is_no_answer() -> None:
    with WarmProcess() as warm, pytest.raises(ChildFailed, match="ended with status 1"):
        answer(RunningQuery(fork(warm, "print('{}'); raise SystemExit(1)"), 60))


def test_output_of_libraries_is_no_part_of_the_answer() -> None:
    with WarmProcess() as warm:
        code = "import os; os.write(2, b'a warning'); print('\\n{\"answer\": {\"rows\": []}}')"
        assert answer(RunningQuery(fork(warm, code), 60)) == {"rows": []}
