"""What a crash leaves between the erasure and the merge of one batch, whose range comes again in parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.stores.published import Published, TableRecord
from pipelines.sinks.delta import DeltaSettings, DeltaSink, Writer
from pipelines.sinks.delta_merge import ERASED
from pipelines.sinks.sink import TableBatch
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.parking.parked import LOG

TRUNCATED = (35, 0)
"""In the range (20, 60], of which the parts are (20, 30] and (30, 60]."""


def opened(folder: Path, writer: Writer = Writer.DELTA_RS) -> DeltaSink:
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", writer))
    sink.open(LOG)
    return sink


def applied(sink: DeltaSink, said: TableBatch) -> TableRecord:
    """Applied and published."""
    record = sink.apply(said)
    sink.publish(Published(said.upto, 0, {record.relation: record}))
    return record


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_spark_erases_what_the_first_part_brought_again(spark, tmp_path: Path) -> None:
    sink = opened(tmp_path, Writer.AUTO)
    target = applied(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=1)).target
    spark.sql(f"ALTER TABLE delta.`{target}` SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')")
    sink.attach(spark)
    sink._target(ORDERS).erase(TRUNCATED, None, 60, ERASED)
    sink = opened(tmp_path, Writer.AUTO)
    sink.attach(spark)
    applied(sink, batch([put(1, "A", 25)], 20, 30))
    applied(sink, batch([put(3, "c", 50)], 30, 60, truncated=TRUNCATED))

    assert [row["id"] for row in spark.read.format("delta").load(target).collect()] == [3]
