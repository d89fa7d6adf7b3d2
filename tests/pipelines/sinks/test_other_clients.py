"""Another client writes to a Delta target while a batch is merged: the merge is made again, nothing is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.exceptions import DeltaError
from deltalake.schema import PrimitiveType
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import TableRecord
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.latest_state_strategy import LatestState
from pipelines.sinks.delta.merge_source import BaseLookup
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.sink_parts import DeltaSinkParts
from tests.contracts.folded import batch, gone, put

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Client = Callable[[DeltaTable], object]
LATER = batch([put(1, "A", 70), gone(3, 71), put(5, "e", 72)], 60, 80)
EXPECTED = {1: "A", 2: "b", 4: "d", 5: "e"}


class Disturbed(LatestState):
    """A strategy to whose target another client writes after it was opened for a batch, and before the merge."""

    disturb: Client | None = None
    attempts = 0

    def _source(self, target: DeltaTarget, batch: TableBatch, before: BaseLookup) -> pa.Table | DataFrame:
        self.attempts += 1
        source = super()._source(target, batch, before)
        doing, self.disturb = self.disturb, None
        return source if doing is None else self.disturbed(source, target.uri, doing)

    def disturbed(self, source: pa.Table | DataFrame, uri: str, doing: Client) -> pa.Table | DataFrame:
        """The source, when the other client has been there."""
        doing(DeltaTable(uri))
        return source


class DisturbedInSpark(Disturbed):
    """The same where Spark merges: its merge has chosen a version of the target before it reads the source."""

    def __init__(self, parts: DeltaSinkParts, spark: SparkSession) -> None:
        super().__init__(parts)
        self._spark = spark

    def disturbed(self, source: pa.Table | DataFrame, uri: str, doing: Client) -> DataFrame:
        came = Path(uri).with_name("came")

        def read(rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with suppress(FileExistsError):  # the source may be read twice
                came.touch(exist_ok=False)
                doing(DeltaTable(uri))
            yield from rows

        frame = self._spark.createDataFrame(source).coalesce(1)
        return frame.mapInArrow(read, frame.schema)


class DisturbedSink(DeltaSink):
    """A sink with a disturbed strategy."""

    def __init__(self, settings: DeltaSettings, spark: SparkSession | None = None) -> None:
        super().__init__(settings, spark)
        self.strategy = Disturbed(self.parts) if spark is None else DisturbedInSpark(self.parts, spark)
        self._latest = self.strategy


def optimize(table: DeltaTable) -> None:
    assert table.optimize.compact()["numFilesRemoved"] > 0


def cluster(table: DeltaTable) -> None:
    assert table.optimize.z_order(["id"])["numFilesRemoved"] > 0


def update(table: DeltaTable) -> None:
    assert table.update({"item": "'theirs'"}, predicate="id = 2")["num_updated_rows"] == 1


def update_the_same_row(table: DeltaTable) -> None:
    assert table.update({"item": "'theirs'"}, predicate="id = 1")["num_updated_rows"] == 1


def delete(table: DeltaTable) -> None:
    assert table.delete("id = 2")["num_deleted_rows"] == 1


def append(table: DeltaTable) -> None:
    row = pa.table(table.scan(predicate="id = 2"))
    write_deltalake(
        table, row.set_column(row.schema.get_field_index("id"), "id", pa.array([9], pa.int64())), mode="append"
    )


def optimize_and_vacuum(table: DeltaTable) -> None:
    optimize(table)
    assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


def name(table: DeltaTable) -> None:
    table.alter.set_table_properties({"theirs": "too"}, raise_if_not_exists=False)


def add_a_column(table: DeltaTable) -> None:
    table.alter.add_columns(Field("theirs", PrimitiveType("string")))


CHANGES: dict[Client, dict[int, str | None]] = {
    optimize: {},
    cluster: {},
    optimize_and_vacuum: {},
    update: {2: "theirs"},
    update_the_same_row: {},
    delete: {2: None},
    append: {9: "b"},
}
"""What another client does to rows and files, and what is different then."""


Lakes = Callable[[Writer], Path]


@pytest.fixture(name="lakes", scope="module")
def _lakes(tmp_path_factory: pytest.TempPathFactory) -> Lakes:
    """Folders by the writer that filled them; each has a target of four rows in several small files."""

    @cache
    def fill(filling: Writer) -> Path:
        folder = tmp_path_factory.mktemp("lake")
        filler = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", filling))
        filler.open("log-1")
        filler.apply(batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20, generation=1))
        target = filler.apply(batch([put(4, "d", 30)], 20, 40)).target
        # two small files
        write_deltalake(target, pa.table(DeltaTable(target).scan(predicate="id = 4")), mode="append")
        DeltaTable(target).delete("id = 4")
        filler.apply(batch([put(4, "d", 50)], 40, 60))
        filler.close()
        return folder

    return fill


@pytest.fixture(name="sink")
def _sink(request: pytest.FixtureRequest, tmp_path: Path, lakes: Lakes, writer: Writer) -> DisturbedSink:
    """An open one, whose target of four rows in several small files has been written."""
    folder = tmp_path / "lake"
    shutil.copytree(lakes(Writer.INDEXED if writer is Writer.INDEXED else Writer.COPY_ON_WRITE), folder)
    settings = DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", writer)
    if writer is Writer.SPARK:
        request.getfixturevalue("with_delta")
        sink = DisturbedSink(settings, request.getfixturevalue("spark"))
    else:
        sink = DisturbedSink(settings)
    sink.open("log-1")
    return sink


def merged_beside(sink: DisturbedSink, client: Client) -> tuple[TableRecord, dict[int, str]]:
    """The record of a batch in whose middle another client came, and the rows at its version."""
    sink.strategy.disturb = client
    try:
        record = sink.apply(LATER)
    except (DeltaError, PySparkException, Py4JJavaError):
        record = sink.apply(LATER)  # as the driver does, which opens the sink anew
    assert sink.strategy.disturb is None
    rows = read_target(record.target, record.version).read_all()
    assert record.position == LATER.upto
    return record, dict(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))


@pytest.mark.parametrize(
    "client",
    # to a batch it is a client that rewrites files, as optimize is
    [pytest.param(client, marks=pytest.mark.slow if client is cluster else ()) for client in CHANGES],
)
@pytest.mark.parametrize(
    "writer", [Writer.INDEXED, Writer.COPY_ON_WRITE, pytest.param(Writer.SPARK, marks=pytest.mark.slow)]
)
def test_what_another_client_and_the_batch_did_are_both_there(
    sink: DisturbedSink, writer: Writer, client: Client
) -> None:
    _, found = merged_beside(sink, client)

    expected = EXPECTED | CHANGES[client]
    assert found == {key: item for key, item in expected.items() if item is not None}
    # the indexed writer reads the commits of other clients before it merges
    assert (sink.strategy.attempts > 1) == (writer is Writer.SPARK)


@pytest.mark.parametrize(
    ("writer", "client"),
    [
        (Writer.INDEXED, name),
        (Writer.INDEXED, add_a_column),
        (Writer.COPY_ON_WRITE, name),
        (Writer.COPY_ON_WRITE, add_a_column),
        *(pytest.param(Writer.SPARK, client, marks=pytest.mark.slow) for client in (name, add_a_column)),
    ],
)
def test_a_batch_is_merged_again_into_a_target_that_was_described_anew_meanwhile(
    sink: DisturbedSink, writer: Writer, client: Client
) -> None:
    record, found = merged_beside(sink, client)

    assert found == EXPECTED
    # the indexed writer reads the commits of other clients before it merges
    assert sink.strategy.attempts > 1 or writer is not Writer.SPARK
    table = DeltaTable(record.target, version=record.version)
    kept = table.metadata().configuration if client is name else [field.name for field in table.schema().fields]
    assert "theirs" in kept
