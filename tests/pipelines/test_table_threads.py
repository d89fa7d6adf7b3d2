"""The threads that apply the tables of a batch: one for few rows, several for many rows."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from threading import Barrier, get_ident

import pytest

from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.table_threads import TableThreads

PATIENCE = 30.0


def threads_for(folder: Path | str) -> TableThreads:
    return TableThreads(DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}")))


def test_tables_with_few_rows_are_applied_one_after_another_by_the_caller(tmp_path: Path) -> None:
    with closing(threads_for(tmp_path)) as threads:
        found = threads.map(lambda _: get_ident(), [3, 1, 2], 3 * 4_999)

    assert found == dict.fromkeys([3, 1, 2], get_ident())


def test_a_single_table_is_applied_by_the_caller_whose_memory_has_its_rows(tmp_path: Path) -> None:
    with closing(threads_for(tmp_path)) as threads:
        assert threads.map(lambda _: get_ident(), [3], 1_000_000) == {3: get_ident()}


@pytest.mark.parametrize(("folder", "rows"), [("/lake", 10_000), ("s3://lake", 2)], ids=["many rows", "object store"])
def test_other_tables_are_applied_at_once(folder: str, rows: int) -> None:
    both = Barrier(2, timeout=PATIENCE)
    with closing(threads_for(folder)) as threads:
        found = threads.map(lambda relation: (both.wait(), relation)[1], [1, 2], rows)

    assert found == {1: 1, 2: 2}


def test_an_error_is_raised_after_all_other_tables_were_applied(tmp_path: Path) -> None:
    applied, both = [], Barrier(2, timeout=PATIENCE)

    def apply(relation: int) -> None:
        both.wait()
        if relation == 1:
            raise ValueError("refused")
        applied.append(relation)

    with closing(threads_for(tmp_path)) as threads, pytest.raises(ValueError, match="refused"):
        threads.map(apply, [1, 2], 10_000)

    assert applied == [2]
