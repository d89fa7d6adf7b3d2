"""Latest state: a crash between the erasure and the merge of a batch, whose range comes again in parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import ERASED, DeltaTarget
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import FOLDED, ID, ITEM, ORDERS, PRICE, Row, batch, folded, put
from tests.pipelines.dead_letters.sink_driver import LOG, NAN, Driver

BAG = replace(ORDERS, columns=tuple(replace(column, key=None) for column in (ID, ITEM, PRICE)))
TRUNCATED = (35, 0)
"""In the range (20, 60], of which the parts are (20, 30] and (30, 60]."""


def erased(uri: str) -> None:
    """Leave a target as a driver does that is killed before it merges what else the range (20, 60] has."""
    target = DeltaTarget.open(uri)
    assert target is not None
    target.erase(TRUNCATED, None, 60, ERASED)


def opened(folder: Path, writer: Writer = Writer.COPY_ON_WRITE) -> DeltaSink:
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", writer))
    sink.open(LOG)
    return sink


def applied(sink: DeltaSink, said: TableBatch) -> TableRecord:
    """Applied and published."""
    record = sink.apply(said)
    sink.publish(Published(said.upto, 0, {record.relation: record}))
    return record


def bag(after: int, upto: int, came: list[Row], went: list[Row], **control: Any) -> TableBatch:
    """A batch of the same table without a key."""
    images = folded([*came, *went])
    told = {
        "op": pa.array(["u"] * len(came) + ["d"] * len(went)),
        "key": pa.nulls(images.num_rows, FOLDED.field("key").type),
    }
    rows = pa.table([told.get(name, images[name]) for name in FOLDED.names], schema=FOLDED)
    return TableBatch(schema=BAG, rows=rows, frame=None, after=after, upto=upto, **control)


def test_a_row_that_does_not_fit_waits(tmp_path: Path) -> None:
    first = Driver(tmp_path)
    first.take(put(1, "a", 10), upto=20)
    erased(first.record.target)
    second = Driver(tmp_path)
    second.take(put(2, "b", 25), upto=30)

    assert second.take(put(5, "e", 50, price=NAN), put(6, "f", 51), upto=60, truncated=TRUNCATED) == ["5"]
    assert second.items() == {"6": "f"}
    assert Driver(tmp_path).keys() == ["5"]


def test_of_a_table_without_a_key_a_row_may_go_that_is_gone_already(tmp_path: Path) -> None:
    target = applied(opened(tmp_path), bag(0, 20, [put(1, "a", 10), put(2, "b", 11)], [], generation=1)).target
    erased(target)
    sink = opened(tmp_path)
    applied(sink, bag(20, 30, [put(3, "c", 26)], [put(1, "a", 25)]))
    record = applied(sink, bag(30, 60, [put(4, "d", 50)], [], truncated=TRUNCATED))

    assert [row["item"] for row in read_target(record.target).read_all().to_pylist()] == ["d"]


@pytest.mark.slow
@pytest.mark.usefixtures("with_delta")
def test_spark_erases_what_the_first_part_brought_again(spark, tmp_path: Path) -> None:
    sink = opened(tmp_path, Writer.AUTO)
    target = applied(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=1)).target
    spark.sql(f"ALTER TABLE delta.`{target}` SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')")
    sink.attach(spark)
    sink.parts.targets.open(ORDERS).erase(TRUNCATED, None, 60, ERASED)
    sink = opened(tmp_path, Writer.AUTO)
    sink.attach(spark)
    applied(sink, batch([put(1, "A", 25)], 20, 30))
    applied(sink, batch([put(3, "c", 50)], 30, 60, truncated=TRUNCATED))

    assert [row["id"] for row in spark.read.format("delta").load(target).collect()] == [3]
