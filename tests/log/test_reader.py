"""LogReader: ranges of positions, schemas in force, nothing before its commit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from random import Random
from threading import Event

import pyarrow as pa
import pytest

from cdc.errors import LogCorrupt, LogError
from cdc.log.disk_format import GROUP, LogFile
from cdc.log.reader import LogReader, RangeReader, log_exists, read_file
from cdc.log.table_view import REOPEN_AFTER
from cdc.log.writer import LogWriter
from cdc.position import Position
from tests.log.file_damage import damage_column
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table


@pytest.fixture(name="root")
def _root(tmp_path: Path) -> Path:
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    schemas = [row(10, 0, op="s", payload=schema_of().to_json())]
    writer.commit(writer.stage(table(*schemas, *(row(10, n) for n in range(1, 4)))), info(10))
    writer.commit(writer.stage(table(row(20), row(30), row(30, 1, topic="shop.items", relation=2))), info(30))
    later = row(40, 0, op="s", payload=schema_of(16384, "note").to_json())
    writer.commit(writer.stage(table(later, row(40, 1, partial=True))), info(40))
    return tmp_path


def positions(root: Path, after: int, upto: int) -> list[int]:
    batches = LogReader(root).rows(Position(after), Position(upto))
    return sorted({p for batch in batches for p in batch["position"].to_pylist()})


@pytest.mark.parametrize(
    ("after", "upto", "expected"),
    [(0, 40, [10, 20, 30, 40]), (10, 30, [20, 30]), (20, 25, []), (20, 30, [30]), (40, 40, [])],
)
def test_a_range_excludes_its_start_and_includes_its_end(root: Path, after: int, upto: int, expected: list[int]):
    assert positions(root, after, upto) == expected


def test_topics_filter_the_rows(root: Path):
    batches = LogReader(root).rows(Position(0), Position(40), topics=lambda topic: topic == "shop.items")
    assert [r["position"] for b in batches for r in b.to_pylist()] == [30]


@pytest.mark.parametrize(("upto", "names"), [(10, ["id"]), (39, ["id"]), (40, ["id", "note"])])
def test_the_schema_in_force_is_the_last_one_at_or_below_a_position(root: Path, upto: int, names: list[str]):
    assert [c.name for c in LogReader(root).schemas(Position(upto))[16384].columns] == names


def test_an_open_reader_sees_new_commits_only_after_refresh(root: Path):
    reader, writer = LogReader(root), LogWriter.open(root, IDENTITY, LIMITS)
    for position in range(41, 41 + REOPEN_AFTER + 2):
        writer.commit(writer.stage(table(row(position))), info(position))
    assert reader.durable == 40

    reader.refresh()

    assert reader.durable == 40 + REOPEN_AFTER + 2
    assert len(reader.files(Position(40), Position(1000))) == REOPEN_AFTER + 2


def test_the_boundary_never_passes_the_durable_position(root: Path):
    assert LogReader(root).latest_boundary(Position(0)) == 40
    assert LogReader(root).latest_boundary(Position(40)) == 40
    assert LogReader(root).latest_boundary(Position(0), max_rows=1) == 10


def test_the_commit_time_of_the_last_transaction_is_exact(root: Path):
    assert LogReader(root).committed_at(Position(40)) == 1_700_000_000_000_040
    assert LogReader(root).committed_at(Position(10)) == 1_700_000_000_000_000


def test_files_tell_whether_they_hold_partial_images(root: Path):
    assert [f.partial for f in LogReader(root).files(Position(30), Position(40)) if not f.schemas_only] == [True]
    assert not any(f.partial for f in LogReader(root).files(Position(0), Position(30)))


def test_a_damaged_file_is_named(root: Path):
    reader = LogReader(root)
    path = Path(reader.files(Position(10), Position(30))[0].path)
    path.write_bytes(b"PAR1 not any more")
    with pytest.raises(LogCorrupt, match=path.name):
        list(reader.rows(Position(10), Position(30)))


def test_a_new_commit_that_cannot_be_read_is_an_error_of_the_log(root: Path):
    reader = LogReader(root)
    (root / "changes" / "_delta_log" / f"{reader.version + 1:020}.json").write_text("no action")
    with pytest.raises(LogCorrupt, match="'changes' of the log cannot be read"):
        reader.refresh()


def test_no_log_is_an_error_with_a_remedy(tmp_path: Path):
    with pytest.raises(LogError, match="no change log"):
        LogReader(tmp_path)


def test_threads_that_refresh_one_reader_skip_no_commit(tmp_path: Path) -> None:
    writer = LogWriter.open(tmp_path, IDENTITY, LIMITS)
    reader, done = LogReader(tmp_path), Event()
    reader.every_file()

    def refresh() -> None:
        while not done.is_set():
            reader.refresh()

    with ThreadPoolExecutor(4) as threads:
        running = [threads.submit(refresh) for _ in range(4)]
        for position in range(1, 60):
            writer.commit(writer.stage(table(row(position))), info(position))
        done.set()
        for one in running:
            one.result()
    reader.refresh()

    assert reader.version == LogReader(tmp_path).version
    assert sorted(file.last for file in reader.every_file()) == list(range(1, 60))


def test_a_log_exists_once_it_was_created(tmp_path: Path) -> None:
    assert not log_exists(tmp_path / "log")
    LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    assert log_exists(tmp_path / "log")


def large_files(root: Path) -> list[LogFile]:
    """Three files of several row groups, with a row at each position from 1 on."""
    writer, rows = LogWriter.open(root, IDENTITY, LIMITS), table(row(1))
    for number in range(3):
        positions = pa.array(range(number * 3 * GROUP + 1, (number + 1) * 3 * GROUP + 1), pa.int64())
        many = rows.take(pa.array([0] * len(positions))).set_column(0, rows.schema.field(0), positions)
        writer.commit(writer.stage(many), info(positions[-1].as_py()))
    return sorted(LogReader(root).every_file(), key=attrgetter("first"))


def test_ranges_that_are_read_one_after_the_other_have_the_same_rows_as_single_ones(tmp_path: Path) -> None:
    files, random = large_files(tmp_path), Random(3)
    reader, last = RangeReader(), files[-1].last
    steps = sorted(random.sample(range(last), 25))
    jumps = [(random.randrange(last), last) for _ in range(3)]

    back_to_the_first_file = [(3 * GROUP + 3, 3 * GROUP + 7), (0, 5)]

    for after, upto in [*pairwise([0, *steps, last]), *jumps, *back_to_the_first_file]:
        for file in files:
            given = (file, Position(after), Position(upto))
            assert reader.read(*given).equals(read_file(*given))


def test_a_row_group_inside_which_a_range_ends_is_decoded_once(tmp_path: Path) -> None:
    file, reader = large_files(tmp_path)[0], RangeReader()
    second = (Position(GROUP + 10), Position(GROUP + 20))
    before = read_file(file, *second)

    reader.read(file, Position(0), second[0])
    damage_column(Path(file.path), "position", 1)

    assert reader.read(file, *second).equals(before)
    with pytest.raises(LogCorrupt):
        read_file(file, *second)


def test_a_reader_keeps_no_rows_after_the_end_of_a_file(tmp_path: Path) -> None:
    file, reader = large_files(tmp_path)[0], RangeReader()
    end = (Position(file.last - 10), file.last)

    reader.read(file, *end)
    damage_column(Path(file.path), "position", 2)

    with pytest.raises(LogCorrupt):
        reader.read(file, *end)
