"""Peer: the `foreachBatch` of the blog posts: the latest change of each key by a window, then one MERGE."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from cdc.targets.lake_reader import read_target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_COLUMNS = ("id", "amount", "state", "note")


def rows_of(target: str) -> pa.Table:
    """The rows of a Delta table by key, as text; the engine's views know no order."""
    rows = read_target(target, None).read_all().select(list(_COLUMNS))
    whole = rows.cast(pa.schema([(name, pa.int64() if name == "id" else pa.string()) for name in _COLUMNS]))
    return whole.sort_by("id")


class Peer:
    """A Delta table kept by hand; its changes are typed Parquet already, which spares it reading a log."""

    def __init__(self, session: SparkSession, folder: Path) -> None:
        self._session, self._path = session, str(folder)

    def fill(self, plain: Path) -> None:
        """The rows that are there before the first batch."""
        self._session.read.parquet(str(plain)).select(*_COLUMNS).write.format("delta").save(self._path)

    def __call__(self, plain: Path) -> None:
        """One batch, as a streaming query would hand it over."""
        self._merge(self._session.read.parquet(str(plain)))

    def rows(self) -> pa.Table:
        """What it holds, by key."""
        return rows_of(self._path)

    def _merge(self, batch: DataFrame) -> None:
        from delta.tables import DeltaTable
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        newest = Window.partitionBy("id").orderBy(F.desc("number"))
        latest = batch.withColumn("place", F.row_number().over(newest)).where("place = 1")
        values = {name: f"s.{name}" for name in _COLUMNS}
        merge = DeltaTable.forPath(self._session, self._path).alias("t").merge(latest.alias("s"), "t.id = s.id")
        merge = merge.whenMatchedDelete("s.op = 'd'").whenMatchedUpdate(set=values)
        merge.whenNotMatchedInsert("s.op <> 'd'", values=values).execute()
