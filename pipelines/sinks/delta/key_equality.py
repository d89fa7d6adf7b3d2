"""Key equality: -0 and 0 are two texts in the log, but one key in an index of Postgres and in both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN
from pipelines.folding.keyless_fold import row_ids
from pipelines.sinks.delta.merge import backticked

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_RANK: Final = "_rank"


def comparable(values: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Values of a key column in a form in which equal values are equal bit by bit."""
    return pc.add(values, pa.scalar(0, values.type)) if pa.types.is_floating(values.type) else values


def comparable_keys(keys: pa.Table) -> pa.Table:
    """As comparable, for all columns of keys."""
    return pa.table([comparable(column) for column in keys.columns], keys.column_names)


def numbered(keys: pa.Table) -> np.ndarray:
    """A number for every row, int64: equal for equal keys."""
    return row_ids(comparable_keys(keys).columns, keys.num_rows)


def latest(rows: pa.Table, key: Sequence[str]) -> pa.Table:
    """The latest row of each key, of a target's rows or a merge's source."""
    numbers = numbered(rows.select(list(key)))
    order = np.lexsort((rows[ORDINAL_COLUMN].to_numpy(), rows[POSITION_COLUMN].to_numpy()))
    last = np.zeros(int(numbers.max(initial=-1)) + 1, np.int64)
    last[numbers[order]] = order  # of several the last one stays
    return rows.take(pa.array(last))


def one_of_each(source: pa.Table, key: Sequence[str]) -> pa.Table:
    """A merge's source without rows that a later row of an equal key in another text replaces."""
    return latest(source, key) if any(pa.types.is_floating(source.schema.field(name).type) for name in key) else source


def one_of_each_in_spark(source: DataFrame, key: Sequence[str]) -> DataFrame:
    """As one_of_each, on the cluster."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F
    from pyspark.sql.types import DoubleType, FloatType

    if not any(isinstance(source.schema[name].dataType, DoubleType | FloatType) for name in key):
        return source
    latest_first = [F.col(POSITION_COLUMN).desc(), F.col(ORDINAL_COLUMN).desc()]
    same_key = Window.partitionBy(*(backticked(name) for name in key)).orderBy(*latest_first)
    return source.withColumn(_RANK, F.row_number().over(same_key)).where(F.col(_RANK) == 1).drop(_RANK)
