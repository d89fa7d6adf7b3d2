"""The process that runs one query of the API: its input, its output, and what it may not do."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cdc.errors import QueryFailed, QueryStopped
from cdc.targets.table_query import QueriedSink, QueryRequest
from tests.fixtures.one_table_lake import OneTableLake

COMMAND = (sys.executable, "-m", "cdc.service.query_process")


@pytest.fixture(name="lake")
def _lake(tmp_path: Path) -> OneTableLake:
    lake = OneTableLake(tmp_path)
    lake.publish(20, 40)
    return lake


def run(lake: OneTableLake, request: QueryRequest) -> dict[str, Any]:
    given = pickle.dumps((QueriedSink(lake.definition), request))
    ended = subprocess.run(COMMAND, input=given, stdout=subprocess.PIPE, check=True, timeout=60)
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def test_the_last_line_of_the_output_is_the_answer(lake: OneTableLake) -> None:
    found = run(lake, QueryRequest(sql="select id from orders order by id", limit=1))

    assert found["answer"]["rows"] == [[20]]
    assert found["answer"]["more"] is True
    assert found["answer"]["cut"]["position"] == "0/28"


def test_an_error_of_the_query_is_an_answer_too(lake: OneTableLake) -> None:
    found = run(lake, QueryRequest(sql="select 1 / 0 from orders"))

    assert found["error"]["code"] == QueryFailed.code
    assert found["error"].keys() == {"code", "message", "suggestion"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory")
def test_rows_that_need_too_much_memory_are_an_error(lake: OneTableLake) -> None:
    many = "select repeat('x', 5000) from (select unnest(range(0, 150000)))"
    found = run(lake, QueryRequest(sql=many, limit=150_000))

    assert found["error"]["code"] == QueryStopped.code
    assert found["error"]["message"] == "the query needs more than 1,073,741,824 bytes of memory"
