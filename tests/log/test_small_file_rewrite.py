"""Settled: what many small files hold lies in few afterwards, and nobody who reads can tell."""

from __future__ import annotations

import json
import signal
from collections import Counter
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt, LogFenced
from cdc.log.disk_format import CHANGES, GROUP, SMALL_GROUP, LogFile
from cdc.log.reader import LogReader
from cdc.log.retired_files import list_removals
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.small_file_rewrite import (
    CLOSED_MIN_SAVING,
    CLOSED_PREFIX,
    OPEN_PREFIX,
    SMALL_BYTES,
    Rewrite,
    RewriteJob,
    SmallFileRewriter,
    plan_rewrite,
    rewrite_files,
)
from cdc.log.vacuum import remove_staged_files
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.fixtures import forked
from tests.log.rows import IDENTITY, info, row, schema_of, table
from tests.log.simple_compaction import Row, compact, read_range

CLOSED = 12
"""Commits of the first segment."""
KILLED = """
import sys
from pathlib import Path
from cdc.log.writer import LogWriter
from cdc.log.reader import LogReader
from cdc.log.writer import SegmentLimits
from cdc.log.small_file_rewrite import plan_rewrite, rewrite_files
root = Path(sys.argv[1])
rewrite = rewrite_files(root, plan_rewrite(LogReader(root).every_file()), lambda: False)
LogWriter(root, SegmentLimits(size=1, age=3600.0)).rewrite(rewrite.new, rewrite.old)
"""


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of two segments; in the first two tables change by turns, and each commit but one brings a version of one."""
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1 << 20, age=3600.0))
    for number in range(CLOSED):
        place, at = 10 * (number + 1), 7 + number % 2
        rows = [row(place, n, relation=at + n % 2, key=[str(number)]) for n in range(4)]
        schema = row(place, 4, op="s", relation=at, key=None, payload=schema_of(at, f"v{number}").to_json())
        writer.commit(writer.stage(table(*rows, *([schema] if number else []))), info(place))
    later = LogWriter(tmp_path, SegmentLimits(size=1 << 20, age=3600.0))
    later.commit(later.stage(table(row(500))), info(500))
    return later


def never() -> bool:
    return False


def written(root: Path) -> Rewrite:
    job = plan_rewrite(LogReader(root).every_file())
    assert job is not None
    rewrite = rewrite_files(root, job, never)
    assert rewrite is not None
    return rewrite


def everything(root: Path) -> list[Row]:
    log = LogReader(root)
    rows = read_range(log, Position(0), log.durable or Position(0))
    return sorted(rows, key=lambda found: (found["position"], found["ordinal"]))


def names(root: Path) -> Counter[str]:
    return Counter(Path(file.path).name.partition("-")[0] + "-" for file in LogReader(root).every_file())


def test_a_settled_segment_holds_the_same_rows_in_few_sorted_files(writer: LogWriter, tmp_path: Path):
    before, rows = LogReader(tmp_path), everything(tmp_path)
    rewrite = written(tmp_path)
    assert everything(tmp_path) == rows
    assert writer.rewrite(rewrite.new, rewrite.old)

    after = LogReader(tmp_path)
    assert everything(tmp_path) == rows
    assert (after.durable, after.last_commit, after.oldest) == (500, before.last_commit, before.oldest)
    assert after.schema_history() == before.schema_history()
    found = [file for file in after.every_file() if file.segment == 0]
    assert [(file.schemas_only, file.first, file.last) for file in sorted(found, key=lambda f: f.first)] == [
        (False, 10, 120),
        (True, 20, 120),
    ]
    batch = next(after.rows(Position(0), Position(120)))
    places = list(zip(*(batch[name].to_pylist() for name in ("relation", "position", "ordinal")), strict=True))
    assert places == sorted(places)


def test_the_commit_says_that_no_row_changed(writer: LogWriter, tmp_path: Path):
    rewrite = written(tmp_path)
    writer.rewrite(rewrite.new, rewrite.old)
    commit = commit_file(tmp_path / CHANGES, LogReader(tmp_path).version)
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    changed = [said["dataChange"] for action in actions for kind, said in action.items() if kind in {"add", "remove"}]
    assert changed == [False] * (len(rewrite.new) + len(rewrite.old))


def test_appends_go_on_while_the_new_files_are_written(writer: LogWriter, tmp_path: Path):
    rewrite = written(tmp_path)
    writer.commit(writer.stage(table(row(600))), info(600))
    rows = everything(tmp_path)
    assert writer.rewrite(rewrite.new, rewrite.old)
    writer.commit(writer.stage(table(row(700))), info(700))
    assert everything(tmp_path)[:-1] == rows
    assert LogWriter(tmp_path, SegmentLimits(size=1, age=1.0)).durable == 700


def test_files_that_were_trimmed_meanwhile_stay_away(writer: LogWriter, tmp_path: Path):
    rewrite = written(tmp_path)
    compact(tmp_path, 200)
    writer.trim([0], Position(120))
    version = LogReader(tmp_path).version
    assert not writer.rewrite(rewrite.new, rewrite.old)
    assert LogReader(tmp_path).version == version


def test_an_attempt_that_is_made_again_finds_that_it_was_made(writer: LogWriter, tmp_path: Path):
    rewrite = written(tmp_path)
    assert writer.rewrite(rewrite.new, rewrite.old)
    version = LogReader(tmp_path).version
    assert writer.rewrite(rewrite.new, rewrite.old)
    assert LogReader(tmp_path).version == version


def test_a_writer_that_another_one_overtook_rewrites_nothing(writer: LogWriter, tmp_path: Path):
    stale = LogWriter(tmp_path, SegmentLimits(size=1, age=1.0))
    rewrite = written(tmp_path)
    writer.commit([], info(600))
    with pytest.raises(LogFenced):
        stale.rewrite(rewrite.new, rewrite.old)
    assert writer.rewrite(rewrite.new, rewrite.old)
    with pytest.raises(LogFenced):
        stale.commit([], info(700))


def test_fewer_rows_than_were_there_are_refused(writer: LogWriter, tmp_path: Path):
    rewrite = written(tmp_path)
    with pytest.raises(LogCorrupt, match="have another number of rows"):
        writer.rewrite(rewrite.new[1:], rewrite.old)
    cut = rewrite.new[0].path
    assert isinstance(cut, Path)
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(LogCorrupt, match="cannot be read"):
        writer.rewrite(rewrite.new, rewrite.old)
    assert names(tmp_path)[CLOSED_PREFIX] == 0


def test_who_reads_the_old_files_keeps_them(writer: LogWriter, tmp_path: Path):
    reader = LogReader(tmp_path)
    files = reader.files(Position(0), Position(500))
    rewrite = written(tmp_path)
    writer.rewrite(rewrite.new, rewrite.old)
    assert {path for note in list_removals(tmp_path).values() for path in note.paths} == set(rewrite.old)
    assert remove_staged_files(tmp_path) == 0
    assert reader.files(Position(0), Position(500)) == files
    assert sum(batch.num_rows for batch in reader.rows(Position(0), Position(500))) == len(everything(tmp_path))


@pytest.mark.parametrize(
    ("point", "settled_files"), [pytest.param("rewrite_noted", 0, marks=pytest.mark.slow), ("rewrite_committed", 2)]
)
@pytest.mark.usefixtures("writer")
def test_a_writer_that_is_killed_leaves_the_old_files_or_the_new_ones(tmp_path: Path, point: str, settled_files: int):
    rows = everything(tmp_path)
    killed = forked.run("tests.run_code", KILLED, tmp_path, environment={"CDC_FAILPOINT": point})
    assert killed.status == -signal.SIGKILL
    assert (names(tmp_path)[CLOSED_PREFIX], everything(tmp_path)) == (settled_files, rows)
    remove_staged_files(tmp_path)
    again = LogWriter(tmp_path, SegmentLimits(size=1, age=1.0))
    if not settled_files:
        rewrite = written(tmp_path)
        assert again.rewrite(rewrite.new, rewrite.old)
    assert plan_rewrite(LogReader(tmp_path).every_file()) is None
    assert (names(tmp_path)[CLOSED_PREFIX], everything(tmp_path)) == (2, rows)


@pytest.mark.usefixtures("writer")
def test_who_is_stopped_leaves_nothing_behind(tmp_path: Path):
    files = set((tmp_path / CHANGES).rglob("*.parquet"))
    job = plan_rewrite(LogReader(tmp_path).every_file())
    assert job is not None
    asked = count()
    assert rewrite_files(tmp_path, job, lambda: next(asked) > len(job.groups[0])) is None
    assert set((tmp_path / CHANGES).rglob("*.parquet")) == files


@pytest.mark.usefixtures("writer")
def test_what_is_written_beside_is_put_in_place_by_who_commits(tmp_path: Path):
    rows, settling = everything(tmp_path), SmallFileRewriter(tmp_path, never)
    writer = RetryingWriter(tmp_path, SegmentLimits(size=1, age=1.0), Event(), lambda _blocked: None)
    assert not settling.commit_prepared(writer)
    assert not settling.prepare({0})
    assert settling.prepare()
    assert settling.prepare()  # until it is carried out there is nothing else to do
    assert settling.commit_prepared(writer)
    assert not settling.commit_prepared(writer)
    assert not settling.prepare()
    assert everything(tmp_path) == rows


def test_a_segment_with_a_file_that_cannot_be_read_stays_as_it_is(writer: LogWriter, tmp_path: Path):
    broken = min(Path(file.path) for file in LogReader(tmp_path).every_file() if file.segment == 0)
    broken.write_bytes(broken.read_bytes()[:-10])
    settling = SmallFileRewriter(tmp_path, never)
    assert not settling.prepare()
    assert not settling.prepare()
    assert not settling.commit_prepared(writer)


@pytest.mark.usefixtures("writer")
def test_a_file_that_lacks_rows_is_not_rewritten(tmp_path: Path):
    files = [replace(file, rows=file.rows + 1) for file in LogReader(tmp_path).every_file()]
    job = plan_rewrite(files)
    assert job is not None
    with pytest.raises(LogCorrupt, match="rows, but its commit records"):
        rewrite_files(tmp_path, job, never)


def test_new_files_of_the_open_segment_are_gathered_and_those_when_it_closes_settled(tmp_path: Path):
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1 << 30, age=3600.0))
    settling = SmallFileRewriter(tmp_path, never, min_open=3)

    def gathers(*places: int) -> bool:
        for place in places:
            writer.commit(writer.stage(table(row(place))), info(place))
        return settling.prepare() and settling.commit_prepared(writer)

    assert [gathers(10, 11, 12), gathers(13), gathers(14), gathers(15, 16, 17)] == [False, True, False, True]
    assert (names(tmp_path)[OPEN_PREFIX], len(names(tmp_path))) == (2, 1)
    for place in range(20, 20 + CLOSED_MIN_SAVING):
        writer.commit(writer.stage(table(row(place))), info(place))
    writer = LogWriter(tmp_path, SegmentLimits(size=1, age=1.0))
    assert gathers(30)
    assert (names(tmp_path)[CLOSED_PREFIX], len(LogReader(tmp_path).every_file())) == (1, 2)
    assert [found["position"] for found in everything(tmp_path)] == [
        *range(10, 18),
        *range(20, 20 + CLOSED_MIN_SAVING),
        30,
    ]
    assert not gathers(31)


@pytest.mark.usefixtures("writer")
def test_memory_bounds_what_becomes_one_file(tmp_path: Path):
    job = plan_rewrite(LogReader(tmp_path).every_file())
    assert job is not None
    rewrite = rewrite_files(tmp_path, job, never, memory=1)
    assert rewrite is not None
    assert [file.rows for file in rewrite.new] == [file.rows for group in job.groups for file in group]


@pytest.mark.parametrize(("tables", "size"), [(1, GROUP), (9, SMALL_GROUP)])
def test_in_a_file_of_more_tables_than_groups_the_groups_are_small(tmp_path: Path, tables: int, size: int):
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1 << 30, age=3600.0))
    for place in range(1, 11):
        rows = [row(place, n, relation=n % tables) for n in range(2_000)]
        writer.commit(writer.stage(table(*rows)), info(place))
    later = LogWriter(tmp_path, SegmentLimits(size=1, age=3600.0))
    later.commit(later.stage(table(row(500))), info(500))
    job = plan_rewrite(LogReader(tmp_path).every_file())
    assert job is not None

    rewrite = rewrite_files(tmp_path, job, never)

    assert rewrite is not None
    groups = pq.read_metadata(rewrite.new[0].path)
    assert {groups.row_group(n).num_rows for n in range(groups.num_row_groups)} == {size, 20_000 % size}


FILES = st.tuples(
    st.sampled_from([1] * 9 + [SMALL_BYTES]),
    st.sampled_from([False] * 9 + [True]),
    st.sampled_from([""] * 6 + [OPEN_PREFIX, CLOSED_PREFIX]),
)


@given(sizes=st.lists(st.lists(FILES, min_size=2 * CLOSED_MIN_SAVING, max_size=4 * CLOSED_MIN_SAVING), max_size=3))
def test_every_file_is_settled_once_and_only_small_neighbours_become_one(sizes: list[list[tuple[int, bool, str]]]):
    place = count(1)
    files = [
        LogFile(path=f"x/{prefix}{int(at)}", rows=1, size=size, first=at, last=at, segment=number, schemas_only=schemas)
        for number, segment in enumerate(sizes)
        for size, schemas, prefix in segment
        for at in [Position(next(place))]
    ]
    left = files
    while (job := plan_rewrite(left, min_open=CLOSED_MIN_SAVING)) is not None:
        is_open = job.segment == max(file.segment for file in left)
        assert job.prefix == (OPEN_PREFIX if is_open else CLOSED_PREFIX)
        for group in job.groups:
            assert not any(Path(f.path).name.startswith((CLOSED_PREFIX, OPEN_PREFIX)[: 1 + is_open]) for f in group)
            assert {(file.segment, file.size) for file in group} == {(job.segment, 1)}
            inside = [f for f in left if group[0].first <= f.first <= group[-1].first]
            assert {f for f in inside if f.schemas_only is group[0].schemas_only} == set(group)
        left = replaced(left, job)
    assert sum(file.rows for file in left) == len(files)


@pytest.mark.parametrize(("relations", "again"), [((7, 7), False), ((7, 8), True)])
def test_files_of_a_copy_are_not_written_again(relations: tuple[int, int], *, again: bool):
    files = [
        LogFile(path=f"x/{n}", rows=1, size=2 << 20, first=at, last=at, segment=n // 20, relations=relations)
        for n, at in enumerate(map(Position, range(1, 41)))
    ]
    assert (plan_rewrite(files) is not None) is again


def replaced(files: list[LogFile], job: RewriteJob) -> list[LogFile]:
    gone = {file.path for group in job.groups for file in group}
    rewrite = [
        replace(group[0], path=f"x/{job.prefix}{Path(group[0].path).name}", rows=len(group), last=group[-1].last)
        for group in job.groups
    ]
    return [file for file in files if file.path not in gone] + rewrite
