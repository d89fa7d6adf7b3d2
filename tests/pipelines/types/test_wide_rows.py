"""Rows with more text than fits into one Arrow array, as one huge transaction of documents has."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from cdc.log_row import LOG_SCHEMA
from pipelines.folding.fold import fold
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import typed_rows
from tests.contracts.folded import ID, ORDERS
from tests.pipelines.fold_model import log_row

FILES, ROWS = 23, 1_000
DOCUMENT = "x" * 100_000
FEW = replace(ORDERS, columns=(ID,))
"""Without the documents, so that the rows are small."""


def file_rows(number: int) -> pa.Table:
    """The rows of one log file with equal documents; the first file ends with a partial image."""
    position = 10 + number
    rows = [
        log_row(ORDERS.relation, (position, n), "c", key=[str(n)], after={1: str(n), 2: DOCUMENT})
        for n in range(number * ROWS, (number + 1) * ROWS)
    ]
    part = log_row(ORDERS.relation, (position, ROWS), "u", key=["0"], after={1: "0"}, partial=True)
    return pa.Table.from_pylist([*rows, *([part] if not number else [])], LOG_SCHEMA)


@pytest.mark.slow
def test_more_than_two_gib_of_text_is_folded_and_typed() -> None:
    rows = pa.concat_tables([file_rows(number) for number in range(FILES)])
    assert rows["after"].nbytes > 2**31
    images = fold(rows, sink="lake")
    typed = typed_rows(images, FEW, TypePolicy.EXACT)

    assert images.num_rows == typed.num_rows == FILES * ROWS
    assert pc.count_distinct(typed["id"]).as_py() == FILES * ROWS
