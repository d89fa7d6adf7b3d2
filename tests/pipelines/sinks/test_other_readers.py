"""Other programs that read a target: what the guide says of each is what happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaProtocolError
from pyspark.sql import SparkSession

from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, gone, put
from tests.source_tree import ROOT

GUIDE: Final = "deploy/guides/read-the-tables.md"
ROWS: Final = {(1, "A"), (3, "c"), (4, "d")}
"""Id and item of each row of the target."""
DELETED: Final = 2
"""Rows that its files have, but the table does not: an updated and a deleted one."""
READERS: Final = re.findall(r"^\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|$", (ROOT / GUIDE).read_text("utf-8"), re.MULTILINE)


@pytest.fixture(name="target_of", scope="module")
def _target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Writer], str]:
    folder = tmp_path_factory.mktemp("lake")

    def target(writer: Writer) -> str:
        uri = f"{folder}/{writer.value}/{{schema}}/{{table}}"
        if not Path(f"{folder}/{writer.value}/shop/orders").exists():
            sink = DeltaSink(DeltaSettings("lake", uri, writer))
            sink.open("log-1")
            sink.apply(batch([put(n, "abcd"[n - 1], 10 + n) for n in range(1, 5)], 0, 20, generation=1))
            sink.apply(batch([put(1, "A", 30), gone(2, 31)], 20, 40))
            sink.close()
        return uri.format(schema="shop", table="orders")

    return target


def rows_of(result: Any) -> set[tuple[int, str]] | int:
    """Return id and item of each row of what a reader returned, or the number that it returned."""
    if isinstance(result, int):
        return result
    if hasattr(result, "toArrow"):  # a frame of Spark
        result = result.toArrow()
    elif hasattr(result, "__arrow_c_stream__"):
        result = pa.table(result)
    columns = result.to_pydict() if isinstance(result, pa.Table) else result
    return {(int(id_), str(item)) for id_, item in zip(columns["id"], columns["item"], strict=True)}


def test_the_guide_names_readers() -> None:
    assert len(READERS) >= 10


@pytest.mark.usefixtures("with_delta")
@pytest.mark.parametrize("writer", [Writer.AUTO, Writer.COPY_ON_WRITE], ids=str)
@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader[0])
def test_a_reader_returns_what_the_guide_says(
    reader: tuple[str, str, str], writer: Writer, target_of: Callable[[Writer], str], spark: SparkSession
) -> None:
    expression, *outcomes = reader
    outcome = outcomes[writer is Writer.COPY_ON_WRITE]
    names = {"uri": target_of(writer), "spark": spark, "pa": pa, "pl": pl}
    names |= {"DeltaTable": DeltaTable, "QueryBuilder": QueryBuilder}
    if outcome == "refuses":
        with pytest.raises(DeltaProtocolError, match="deletionVectors"):
            eval(expression, names)
        return
    found = rows_of(eval(expression, names))

    if outcome == "right":
        assert found in (ROWS, len(ROWS))
    else:
        assert outcome.startswith("**wrong**")
        assert found == len(ROWS) + DELETED
