"""Large batches of a table without a key: executors leave the rows, with positions, that the driver leaves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.config import EngineChoice
from cdc.failpoint import VARIABLE, Abandoned
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.sink_loop import SinkLoop
from tests.fixtures.spark import compiling
from tests.pipelines.cold_log import append, log_writer, transactions
from tests.pipelines.fold_model import Image, Row, log_row
from tests.pipelines.test_both_ways import appended_batches, loop_in, records_of, rows_of, schema

EXAMPLES = int(os.environ.get("CDC_BOTH_WAYS_EXAMPLES", "1"))
FLOATS = ("NaN", "0", "-0", "1.5", None)
"""Values of a column: as bits, all of them differ, and NaN equals NaN."""
DYING = ("delta_before_merge", "delta_executor_files", "delta_after_merge")
pytestmark = pytest.mark.usefixtures("with_delta")


def keyless_schema() -> TableSchema:
    """A table of four columns without a key; the third is a float."""
    made = schema(1)
    columns = (replace(column, key=None) for column in made.columns)
    return replace(
        made,
        columns=tuple(
            replace(column, type_oid=701, type_name="double precision") if column.id == 3 else column
            for column in columns
        ),
    )


def written(row: Row) -> Row:
    return row | {"topic": "shop.table1"}


def described() -> Row:
    return written(log_row(1, (9, 0), "s", payload=keyless_schema().to_json()))


class Multiset:
    """A random history of a table whose rows are often equal."""

    def __init__(self, random: Random, *, only_adds: bool) -> None:
        self._random, self._only_adds = random, only_adds
        self._rows: list[Image] = []
        self._position = 10
        self.log = [described(), written(log_row(1, (9, 1), "g", payload=b"9"))]

    def transactions(self) -> list[list[Row]]:
        """Some random transactions."""
        for _ in range(self._random.randint(6, 40)):
            self._transaction()
        return transactions(self.log)

    def _transaction(self) -> None:
        self._position += 1
        first, choices = len(self.log), (6, 0, 0, 0, 0) if self._only_adds else (6, 4, 3, 0.3, 0.3)
        steps = (self._add, self._remove, self._update, self._truncate, self._copy)
        for _ in range(self._random.randint(1, 6)):
            self._random.choices(steps, choices)[0]()
        self.log[first:] = [row | {"ordinal": number} for number, row in enumerate(self.log[first:])]

    def _log(self, op: str, **images: Image) -> None:
        fields = {name: dict(image) for name, image in images.items()}
        self.log.append(written(log_row(1, (self._position, 0), op, **fields)))

    def _image(self) -> Image:
        choice = self._random.choice
        return {1: choice("12"), 2: choice((None, "7")), 3: choice(FLOATS), 4: choice((None, "", "a"))}

    def _add(self) -> None:
        self._rows.append(self._image())
        self._log("c", after=self._rows[-1])

    def _remove(self) -> None:
        if self._rows:
            self._log("d", before=self._rows.pop(self._random.randrange(len(self._rows))))

    def _update(self) -> None:
        if self._rows:
            number = self._random.randrange(len(self._rows))
            before, self._rows[number] = self._rows[number], self._image()
            self._log("u", before=before, after=self._rows[number])

    def _truncate(self) -> None:
        self._rows.clear()
        self._log("t")

    def _copy(self) -> None:
        """A full copy in a transaction of its own."""
        self._position += 1
        for image in self._rows:
            self._log("r", after=image)
        self.log.append(written(log_row(1, (self._position, 0), "g", payload=str(self._position).encode())))
        self._position += 1


def state_of(loop: SinkLoop) -> str:
    """Rows and records of a sink, as a text, in which NaN equals NaN."""
    return repr((rows_of(loop), records_of(loop)))


def run_both_ways(spark: SparkSession, seed: int, *, only_adds: bool) -> None:
    """Apply a random log both ways, batch by batch, and compare all results."""
    random, spark = Random(seed), compiling(spark)
    waiting = Multiset(random, only_adds=only_adds).transactions()
    with TemporaryDirectory() as root:
        folder, log = Path(root), Path(root, "log")
        writer = log_writer(log)
        with (
            loop_in(folder / "here", log, spark, engine=EngineChoice.HERE) as here,
            loop_in(folder / "spark", log, spark) as there,
        ):
            for end in appended_batches(random, writer, waiting):
                here(None, end)
                there(spark, end)
                assert state_of(there) == state_of(here)


@settings(max_examples=EXAMPLES, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), only_adds=st.booleans())
def test_executors_and_driver_leave_the_same_rows(spark: SparkSession, seed: int, *, only_adds: bool) -> None:
    run_both_ways(spark, seed, only_adds=only_adds)


def image(number: int) -> Image:
    return {1: str(number % 3), 2: None, 3: "NaN", 4: "a"}


def added(position: int, numbers: range) -> list[Row]:
    return [written(log_row(1, (position, number), "c", after=image(number))) for number in numbers]


def deleted(position: int, numbers: range) -> list[Row]:
    return [written(log_row(1, (position, number), "d", before=image(number))) for number in numbers]


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """A log with rows of which three are equal to each other, in one file, and then to others in a second file."""
    writer = log_writer(tmp_path / "log")
    append(writer, [[described(), written(log_row(1, (9, 1), "g", payload=b"9"))], added(100, range(9))])
    append(writer, [added(200, range(6))])
    return writer


def test_a_driver_that_dies_around_the_commit_is_followed_by_one_that_ends_the_same(
    spark: SparkSession, tmp_path: Path, writer: LogWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncate = written(log_row(1, (299, 0), "t"))
    append(writer, [deleted(250, range(4)), [truncate], added(300, range(9)), deleted(310, range(4))])
    with loop_in(tmp_path / "here", tmp_path / "log", None) as here:
        for end in (100, 200, 250, 310):
            here(None, Position(end))
        expected = state_of(here)

    with loop_in(tmp_path / "lake", tmp_path / "log", spark) as loop:
        for end in (100, 200, 250):
            loop(spark, Position(end))
    for point in DYING:
        monkeypatch.setenv(VARIABLE, f"{point}:1:abandon")
        with loop_in(tmp_path / "lake", tmp_path / "log", spark) as dying, pytest.raises(Abandoned):
            dying(spark, Position(310))
    monkeypatch.delenv(VARIABLE)
    with loop_in(tmp_path / "lake", tmp_path / "log", spark) as following:
        following(spark, Position(310))
        assert state_of(following) == expected


def test_a_delete_without_an_equal_row_stops_the_table_as_on_the_driver(
    spark: SparkSession, tmp_path: Path, writer: LogWriter
) -> None:
    append(writer, [deleted(300, range(30))])
    states = []
    for name, session in (("here", None), ("spark", spark)):
        with loop_in(tmp_path / name, tmp_path / "log", session) as loop:
            for end in (100, 200, 300):
                loop(session, Position(end))
            states.append(state_of(loop))
    assert states[0] == states[1]
    assert "deletes 15 rows that the target of table 'shop.table1' does not contain" in states[0]


@pytest.mark.parametrize("deletes", ["absent rows", "a row that does not fit"])
def test_of_two_faults_an_added_value_that_does_not_fit_is_reported_both_ways(
    spark: SparkSession, tmp_path: Path, writer: LogWriter, deletes: str
) -> None:
    wrong = written(log_row(1, (301, 0), "c", after=image(1) | {1: "one"}))
    unfit = written(log_row(1, (300, 0), "d", before=image(1) | {1: "two"}))
    append(writer, [deleted(300, range(30)) if deletes == "absent rows" else [unfit], [wrong]])
    states = []
    for name, session in (("here", None), ("spark", spark)):
        with loop_in(tmp_path / name, tmp_path / "log", session) as loop:
            for end in (100, 200, 301):
                loop(session, Position(end))
            states.append(state_of(loop))
    assert states[0] == states[1]
    assert f"at position {Position(301)} cannot be represented" in states[0]


@pytest.mark.parametrize("vectors", ["true", "false"])
def test_rows_of_another_client_stay_and_files_stay(
    spark: SparkSession, tmp_path: Path, writer: LogWriter, vectors: str
) -> None:
    """Without deletion vectors, Delta's MERGE writes the same rows."""
    append(writer, [deleted(300, range(4))])
    rules = f"[{{match: shop.*, properties: {{delta.enableDeletionVectors: '{vectors}'}}}}]"
    with loop_in(tmp_path / "lake", tmp_path / "log", spark, rules=rules) as loop:
        for end in (100, 200):
            loop(spark, Position(end))
        (table,) = loop.record.tables.values()
        target = DeltaTable(table.target)
        columns = pa.schema(target.schema().to_arrow())
        foreign = {"id": 0, "plain": None, "large": float("nan"), "more": "a", "_position": None, "_ordinal": None}
        assert foreign.keys() == {*columns.names}
        write_deltalake(target, pa.Table.from_pylist([foreign], columns), mode="append")
        before = {*DeltaTable(table.target).file_uris()}
        loop(spark, Position(300))
        (rows,) = rows_of_any_client(loop)
        found = DeltaTable(table.target)
        assert sum(row["_position"] is None for row in rows) == 1
        assert sorted(row["id"] for row in rows if row["_position"]) == [0] * 3 + [1] * 4 + [2] * 4
        assert (before <= {*found.file_uris()}) is (vectors == "true")
        assert (found.history(1)[0].get("engineInfo") == "cdc") is (vectors == "true")


def rows_of_any_client(loop: SinkLoop) -> list[list[Row]]:
    tables = loop.record.tables.values()
    return [pa.table(DeltaTable(table.target).scan()).to_pylist() for table in tables]
