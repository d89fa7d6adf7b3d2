"""Export: a range of the log as files; whole or not there, and never over something else."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from cdc.errors import ConfigError, LogTrimmed
from cdc.log.export import ExportResult, export_range, sorted_rows, write_lines, write_parquet
from cdc.log.inspection import EVERY_ROW, rows_of_tables
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, message_row, row, table
from tests.log.sample_log import RESTORED, build_sample_log


@pytest.fixture(name="log", scope="module")
def _log(tmp_path_factory: pytest.TempPathFactory) -> LogReader:
    root = tmp_path_factory.mktemp("exported") / "log"
    build_sample_log(root)
    return LogReader(root)


def places(out: Path) -> list[tuple[int, int]]:
    parts = [pq.ParquetFile(file).read() for file in sorted(out.iterdir())]
    assert all(part.schema.equals(LOG_SCHEMA) for part in parts)
    return [(row["position"], row["ordinal"]) for part in parts for row in part.to_pylist()]


def test_parquet_holds_the_rows_as_they_are(log: LogReader, tmp_path: Path):
    asked = export_range(log, None, None)
    done = write_parquet(log, asked, tmp_path / "out")
    expected = [r for batch in log.rows(log.oldest, Position(RESTORED + 10)) for r in batch.to_pylist()]
    (file,) = (tmp_path / "out").iterdir()
    assert pq.ParquetFile(file).read().to_pylist() == expected
    assert done == ExportResult(len(expected), 1, file.stat().st_size)


def test_a_range_includes_both_of_its_ends(log: LogReader, tmp_path: Path):
    write_parquet(log, export_range(log, Position(120), Position(130)), tmp_path / "out")
    assert {position for position, _ in places(tmp_path / "out")} == {120, 130}


def test_of_named_tables_come_only_their_rows(log: LogReader, tmp_path: Path):
    asked = export_range(log, None, None, rows_of_tables(lambda topic: topic == "shop.items"))
    assert places_after(log, asked, tmp_path) == {(140, 1), (140, 2), (140, 3), (RESTORED + 10, 1)}


def places_after(log: LogReader, asked: object, folder: Path) -> set[tuple[int, int]]:
    folder.mkdir(exist_ok=True)
    write_parquet(log, asked, folder / "out")  # type: ignore[arg-type]
    return set(places(folder / "out"))


def test_without_named_tables_messages_come_too_as_lines_and_as_parquet(tmp_path: Path):
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    writer.commit(writer.stage(table(row(10, 0), message_row(10, 1), message_row(20, key=None))), info(20))
    log = LogReader(tmp_path / "log")
    every = {(10, 0), (10, 1), (20, 0)}
    for selected, expected in ((EVERY_ROW, every), (rows_of_tables(lambda _topic: True), {(10, 0)})):
        asked = export_range(log, None, None, selected)
        rows = [row for part in sorted_rows(log, asked) for row in part.to_pylist()]
        assert {(row["position"], row["ordinal"]) for row in rows} == expected
        assert places_after(log, asked, tmp_path / str(len(expected))) == expected


def test_files_end_after_so_many_rows(log: LogReader, tmp_path: Path):
    done = write_parquet(log, export_range(log, None, None), tmp_path / "out", file_rows=3)
    assert done.files > 2
    assert sorted(places(tmp_path / "out")) == sorted(set(places(tmp_path / "out")))
    assert len(places(tmp_path / "out")) == done.rows


def test_an_existing_file_is_never_overwritten(log: LogReader, tmp_path: Path):
    (tmp_path / "out").write_text("mine")
    for write in (
        lambda: write_parquet(log, export_range(log, None, None), tmp_path / "out"),
        lambda: write_lines([{}], tmp_path / "out"),
    ):
        with pytest.raises(ConfigError, match="already exists"):
            write()
    assert (tmp_path / "out").read_text() == "mine"


def test_a_missing_directory_is_an_error(log: LogReader, tmp_path: Path):
    with pytest.raises(ConfigError, match="does not exist"):
        write_lines([], tmp_path / "missing" / "out")


def test_a_failed_export_leaves_no_file(tmp_path: Path):
    def broken():
        yield {"a": 1}
        raise LogTrimmed("gone")

    with pytest.raises(LogTrimmed):
        write_lines(broken(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_what_was_trimmed_is_told_with_the_first_that_is_left(log: LogReader):
    with pytest.raises(LogTrimmed) as refused:
        export_range(log, Position(100), None)
    assert str(Position(116)) in refused.value.fix
