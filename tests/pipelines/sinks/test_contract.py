"""Sink contract: which batches are valid, and which sinks can park rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cdc.table import TableState
from pipelines.sinks.contract import ParkingSink, TableBatch
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink
from tests.contracts.folded import ORDERS, batch, put

COPYING = replace(ORDERS, state=TableState.SNAPSHOTTING)


def test_a_batch_has_its_rows_in_one_form_only() -> None:
    frame: Any = object()
    rows = batch([put(1, "a", 10)], 0, 20)

    with pytest.raises(ValueError, match=r"'shop.orders' has both rows and a frame"):
        replace(rows, frame=frame)
    assert TableBatch(ORDERS, None, None, 0, 20).rows is None


def test_a_batch_ends_at_or_after_its_start() -> None:
    assert batch(None, 20, 20).upto == 20
    with pytest.raises(ValueError, match="ends before it begins"):
        batch(None, 20, 19)


@pytest.mark.parametrize(
    ("made", "copying", "ends"),
    [
        (batch(None, 0, 20), False, False),
        (batch(None, 0, 20, generation=5), False, True),
        (batch(None, 0, 20, COPYING), True, False),
        (batch(None, 0, 20, COPYING, generation=5), True, False),
    ],
)
def test_a_copy_ends_with_a_generation_while_no_other_copy_runs(made: TableBatch, copying: bool, ends: bool) -> None:
    assert (made.is_copying, made.ends_copy) == (copying, ends)


def test_both_sinks_can_park_rows(tmp_path: Path) -> None:
    assert isinstance(DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}")), ParkingSink)
    assert isinstance(SearchSink("find", tmp_path / "index"), ParkingSink)
