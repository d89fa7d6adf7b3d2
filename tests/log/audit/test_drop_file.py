"""Damaged: a file that cannot be read leaves the log, and whoever may lack something for it is told."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cdc.errors import ConfigError, LogCorrupt, LogFenced, LogTrimmed
from cdc.failpoint import VARIABLE
from cdc.log import retired_files
from cdc.log.audit.delta_tables import read_log_tables
from cdc.log.audit.drop_file import DamagedFile, DroppedFile, RecoveryWay, position_behind
from cdc.log.audit.finding import DamageKind
from cdc.log.audit.verify import verify
from cdc.log.compacted_table import read_compacted_state
from cdc.log.lost_range_records import lost_ranges_in
from cdc.log.reader import LogReader
from cdc.log.small_file_rewrite import plan_rewrite
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.table import TableState
from pipelines.compaction.compaction_steps import compact
from tests.fixtures import forked
from tests.log.file_damage import flip_byte, page_of
from tests.log.rows import info, row, table
from tests.log.sample_log import ITEMS, ORDERS, RESTORED, SEGMENT_PER_FILE, build_sample_log

KILLED = -9
END = Position(RESTORED + 10)
DEFINITION = "name: shop\nsource: {dsn: 'postgresql://u@127.0.0.1:1/d'}\ntables: [{match: 'shop.*'}]\nsinks: []\n"


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "log"
    build_sample_log(root)
    return root


@pytest.fixture(name="root")
def _root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "log"))


def file_at(root: Path, position: int, of: str = "changes", *, schemas: bool = False) -> str:
    return next(
        c.path
        for c in read_log_tables(root).claims
        if (c.table, c.first, c.has_schemas_only) == (of, position, schemas)
    )


def flipped(root: Path, path: str, column: str = "after") -> str:
    flip_byte(root / path, page_of(root / path, column))
    return path


def dropped(root: Path, path: str) -> DroppedFile:
    return DamagedFile.find(root, path).drop()


def states(root: Path) -> dict[int, TableState]:
    return {relation: schema.state for relation, schema in LogReader(root).schemas().items()}


def harm(root: Path) -> set[DamageKind]:
    return {finding.damage for finding in verify(root).findings}


def test_what_is_sound_or_nobodys_is_refused(root: Path):
    with pytest.raises(ConfigError, match="is not damaged"):
        DamagedFile.find(root, file_at(root, 140))
    for path in ("changes/segment=0/x.parquet", "changes", "../log"):
        with pytest.raises(ConfigError, match="no file"):
            DamagedFile.find(root, path)


@pytest.mark.parametrize("how", ["flipped", "cut short", "gone"])
def test_a_file_is_given_up_and_its_tables_are_marked_in_one_commit(root: Path, how: str):
    path = file_at(root, RESTORED)
    if how == "flipped":
        flipped(root, path)
    elif how == "cut short":
        (root / path).write_bytes((root / path).read_bytes()[:-9])
    else:
        (root / path).unlink()
    before = LogReader(root)
    done = dropped(root, str(root / path))
    assert (done.file, done.way, done.first, done.marked) == (path, RecoveryWay.GIVEN_UP, RESTORED, ("shop.orders",))
    after = LogReader(root)
    assert (after.version, after.durable) == (before.version + 1, END + 1)
    assert states(root) == {ORDERS: TableState.NEEDS_RESYNC, ITEMS: TableState.LIVE}
    assert harm(root) == {DamageKind.LOST}
    assert [row["op"] for rows in after.rows(END, Position(END + 1)) for row in rows.to_pylist()] == ["s"]


def test_where_the_tables_cannot_be_read_all_that_may_be_in_it_are_marked(root: Path):
    done = dropped(root, flipped(root, file_at(root, 140), "relation"))
    assert done.marked == ("shop.items", "shop.orders")


def test_no_range_ends_between_lost_rows_and_the_word_about_them(root: Path):
    dropped(root, flipped(root, file_at(root, 140)))
    log = LogReader(root)
    ends = [log.latest_boundary(Position(after), 1) for after in (0, 120, 130, 140)]
    assert ends == [120, 130, END + 1, RESTORED]
    for upto in (140, RESTORED, END):
        assert not log.leads(Position(130), Position(upto))
        for asked in (log.files, log.history):
            with pytest.raises(LogTrimmed, match="were lost with a damaged file"):
                asked(Position(130), Position(upto))
    assert log.leads(Position(120), Position(130))
    assert log.files(Position(140), Position(END))
    assert log.files(Position(130), Position(END + 1))


def test_changes_that_are_compacted_are_trimmed_and_nothing_is_lost(root: Path):
    done = dropped(root, flipped(root, file_at(root, 120)))
    assert (done.way, done.marked) == (RecoveryWay.TRIMMED, ())
    assert (LogReader(root).oldest, LogReader(root).durable) == (120, END)
    assert set(states(root).values()) == {TableState.LIVE}
    assert harm(root) == set()


def test_a_lost_state_marks_its_tables_before_it_goes(root: Path):
    held = read_compacted_state(root)
    assert held is not None
    name = next(file.path for file in held.files if not file.schemas_only and file.last <= 115)
    done = dropped(root, flipped(root, name.removeprefix(f"{root}/")))
    assert (done.way, done.marked) == (RecoveryWay.GIVEN_UP, ("shop.items", "shop.orders"))
    after = read_compacted_state(root)
    assert after is not None
    assert {file.path for file in held.files} - {file.path for file in after.files} == {name}
    assert (after.horizon, after.floor) == (held.horizon, held.floor)
    assert LogReader(root).latest_boundary(Position(0), 1) == END + 1
    assert harm(root) == {DamageKind.LOST}


def test_a_state_of_which_every_change_is_there_is_made_anew(tmp_path: Path):
    writer = LogWriter.open(tmp_path, build_sample_log(tmp_path / "other").identity, SEGMENT_PER_FILE)
    for position in (8, 16, 24):
        writer.commit(writer.stage(table(row(position))), info(position))
    compact(None, tmp_path, upto=Position(16))
    held = read_compacted_state(tmp_path)
    assert held is not None
    done = dropped(tmp_path, flipped(tmp_path, held.files[0].path.removeprefix(f"{tmp_path}/")))
    assert (done.way, done.marked) == (RecoveryWay.START_OVER, ())
    assert (read_compacted_state(tmp_path).horizon, read_compacted_state(tmp_path).files) == (0, [])  # type: ignore[union-attr]
    with pytest.raises(LogFenced):
        writer.commit(writer.stage(table(row(32))), info(32))
    assert compact(None, tmp_path, upto=Position(16)).horizon == 16
    assert read_compacted_state(tmp_path).horizon == 16  # type: ignore[union-attr]


def test_what_tells_the_columns_of_tables_is_not_given_up(root: Path):
    path = flipped(root, file_at(root, 130, schemas=True), "payload")
    with pytest.raises(LogCorrupt, match="cannot be dropped"):
        dropped(root, path)
    assert path in {c.path for c in read_log_tables(root).claims}


def test_a_writer_that_runs_meanwhile_is_fenced_and_one_that_starts_goes_on(root: Path):
    running = LogWriter(root, SEGMENT_PER_FILE)
    dropped(root, flipped(root, file_at(root, 140)))
    with pytest.raises(LogFenced):
        running.commit(running.stage(table(row(END + 8))), info(END + 8))
    next_one = LogWriter(root, SEGMENT_PER_FILE)
    next_one.commit(next_one.stage(table(row(END + 8))), info(END + 8))
    assert LogReader(root).durable == END + 8


def test_the_file_stays_on_the_disk_for_who_still_reads_it(root: Path):
    path = flipped(root, file_at(root, 140))
    dropped(root, path)
    assert (root / path).exists()
    assert [
        f"changes/{name}" for note in retired_files.list_removals(root).values() for name in note.paths if name in path
    ] == [path]


def test_the_word_about_lost_rows_keeps_its_name_when_files_are_settled(root: Path):
    dropped(root, flipped(root, file_at(root, 140)))
    files = LogReader(root).every_file()
    (lost,) = lost_ranges_in(files)
    assert lost == (140, 140, END + 1)
    job = plan_rewrite(files, min_open=0)
    assert job is None or all("/lost-" not in file.path for group in job.groups for file in group)


@pytest.mark.parametrize(("of", "point"), [
    ("changes", "drop_noted"), ("compacted", "drop_noted"),
    *(pytest.param(of, "drop_committed", marks=pytest.mark.slow) for of in ("changes", "compacted")),
])  # fmt: skip
def test_killed_anywhere_it_is_done_again_or_was_done(root: Path, tmp_path: Path, of: str, point: str):
    path = file_at(root, 140) if of == "changes" else _state_of(root)
    flipped(root, path)
    definition = tmp_path / "shop.yaml"
    definition.write_text(DEFINITION + f"log: {{path: '{root}'}}\n")
    passes = "" if of == "changes" else ":2"  # the first ones are of the marks, in the other table
    command = ("cdc", "log", "drop-file", path, "--yes", "-c", str(definition))
    assert forked.run(*command, environment={VARIABLE: f"{point}{passes}"}).status == KILLED
    again = forked.run(*command)
    assert again.status == (2 if point == "drop_committed" else 0), again.errors
    assert harm(root) == {DamageKind.LOST}
    assert LogReader(root).durable == END + 1
    assert set(states(root).values()) == {TableState.NEEDS_RESYNC}


def _state_of(root: Path) -> str:
    held = read_compacted_state(root)
    assert held is not None
    return next(f.path for f in held.files if not f.schemas_only and f.last <= 115).removeprefix(f"{root}/")


def test_nothing_of_the_source_can_stand_where_the_word_stands():
    assert position_behind(Position(64)) == 65
    assert position_behind(Position(69)) == 70
    for last in (70, 71):
        with pytest.raises(LogCorrupt, match="the source may use this position"):
            position_behind(Position(last))
