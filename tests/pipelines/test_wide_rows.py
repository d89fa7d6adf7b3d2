"""Rows whose text together is more than one Arrow array can hold, as of one huge transaction of documents."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.change import LOG_SCHEMA
from pipelines.folding.fold import fold
from pipelines.types import TypePolicy
from pipelines.types.rows import typed_rows
from tests.contracts.folded import ID, ORDERS
from tests.pipelines.lives import log_row

PIECES, ROWS = 23, 1_000
DOCUMENT = "x" * 100_000
FEW = replace(ORDERS, columns=(ID,))
"""Without the documents, so that the rows are small."""


def piece(number: int) -> pa.Table:
    """What one file of the log holds, all of them the same documents; the last of the first is partial."""
    position = 10 + number
    rows = [
        log_row(ORDERS.relation, (position, n), "c", key=[str(n)], after={1: str(n), 2: DOCUMENT})
        for n in range(number * ROWS, (number + 1) * ROWS)
    ]
    part = log_row(ORDERS.relation, (position, ROWS), "u", key=["0"], after={1: "0"}, partial=True)
    return pa.Table.from_pylist([*rows, *([part] if not number else [])], LOG_SCHEMA)


@pytest.mark.slow
def test_they_are_folded_and_typed() -> None:
    rows = pa.concat_tables([piece(number) for number in range(PIECES)])
    assert rows["after"].nbytes > 2**31
    images = fold(rows, sink="lake")
    typed = typed_rows(images, FEW, TypePolicy.EXACT)

    assert images.num_rows == typed.num_rows == PIECES * ROWS
    assert pc.count_distinct(typed["id"]).as_py() == PIECES * ROWS
