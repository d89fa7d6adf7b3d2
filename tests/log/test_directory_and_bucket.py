"""A log holds what it promises wherever it lies: in a directory, and in a bucket of an object store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest

from cdc.bucket_files import Root
from cdc.delta_protocol.checkpoints import checkpoint, checkpoint_in_bucket
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogError, LogFenced, LogFormatUnknown
from cdc.log import consumers, maintenance_worker
from cdc.log.audit.verify import verify
from cdc.log.compacted_table import CompactedWriter, read_compacted_state
from cdc.log.consumers import Consumer
from cdc.log.disk_format import CHANGES, COMPACTED, FORMAT, segment_of
from cdc.log.epoch_and_slot_records import PendingEpoch, read_pending_epoch, remove_pending_epoch, write_pending_epoch
from cdc.log.format_upgrade import MigrationResult, migrate_log
from cdc.log.reader import PROBE_EVERY, LogReader
from cdc.log.retrying_writer import RetryingWriter
from cdc.log.small_file_rewrite import CLOSED_PREFIX, OPEN_PREFIX, SmallFileRewriter, plan_rewrite, rewrite_files
from cdc.log.table_io import open_table
from cdc.log.trim_plan import REQUEST_FILE, Retention, plan_trim, request_trim
from cdc.log.vacuum import remove_staged_files, vacuum, waiting
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.simple_compaction import compact, latest_state, open_compactor, read_range
from tests.log.table_writers import APPENDS, COMPACTS, TableWriter
from tests.log.test_format_upgrade import DATA, readable_state

SMALL = SegmentLimits(size=1, age=3600.0)
"""Each commit begins a segment of its own."""
AT_ONCE = Retention(max_age=0.0, grace=0.0)


@pytest.fixture(name="root", params=["directory", "bucket"])
def _root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    return tmp_path if request.param == "directory" else request.getfixturevalue("s3").root()


def append(writer: LogWriter | RetryingWriter, *positions: int) -> None:
    """A transaction of two rows at each."""
    for position in positions:
        writer.commit(writer.stage(table(row(position), row(position, 1))), info(position))


def rows_of(root: Root, after: int = 0) -> list[tuple[int, int]]:
    log = LogReader(root)
    return [(r["position"], r["ordinal"]) for r in read_range(log, Position(after), log.durable or Position(0))]


def wrote(*positions: int) -> list[tuple[int, int]]:
    return [(position, ordinal) for position in positions for ordinal in (0, 1)]


def test_what_is_appended_is_read_and_resumed_from(root: Root) -> None:
    append(LogWriter.open(root, IDENTITY, LIMITS), 10, 20)
    second = LogWriter.open(root, IDENTITY, LIMITS)
    append(second, 30)

    assert second.last_commit == info(30)
    assert rows_of(root) == wrote(10, 20, 30)
    assert rows_of(root, after=10) == wrote(20, 30)


def test_a_place_without_a_log_is_told(root: Root) -> None:
    with pytest.raises(LogError, match="no change log at"):
        LogReader(root / "elsewhere")


def test_a_view_moves_to_what_was_committed(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    append(writer, 10)
    log = LogReader(root)
    append(writer, 20)

    def moved() -> bool:
        log.refresh()
        return log.durable == 20

    until(moved, "the view to move", every=PROBE_EVERY)


def test_of_two_writers_the_second_to_commit_is_fenced(root: Root) -> None:
    first = LogWriter.open(root, IDENTITY, LIMITS)
    append(first, 10)
    second = LogWriter(root, LIMITS)
    append(second, 20)

    with pytest.raises(LogFenced):
        append(first, 20)
    with pytest.raises(LogFenced):
        append(first, 30)
    append(second, 30)
    assert rows_of(root) == wrote(10, 20, 30)


@pytest.mark.parametrize(
    ("root", "of"),
    [
        ("directory", COMPACTS),
        ("bucket", APPENDS),
        pytest.param("directory", APPENDS, marks=pytest.mark.slow),
        pytest.param("bucket", COMPACTS, marks=pytest.mark.slow),
    ],
    ids=lambda of: getattr(of, "name", of),
    indirect=["root"],
)
def test_a_stopped_writer_is_fenced_past_checkpoint_and_clean_up(root: Root, of: TableWriter) -> None:
    of.create(root)
    stopped, second = of.writer(root), of.writer(root)
    for position in (20, 30, 40):
        second(position)
    table = open_table(root / of.name)
    if isinstance(root, Path):
        checkpoint(root / of.name, table.version())
    else:
        checkpoint_in_bucket(table)
    second(50)
    for number in range(4):  # as a clean-up does once they are old
        commit_file(root / of.name, number).unlink()

    assert (root / of.name / "_delta_log" / "_last_checkpoint").exists()
    with pytest.raises(LogFenced):
        stopped(11)
    assert sorted(of.positions(root)) == [10, 10, 20, 20, 30, 30, 40, 40, 50, 50]


def test_what_was_staged_and_never_committed_is_removed(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    append(writer, 10)
    # the times of an object store are whole seconds
    until(lambda: remove_leftovers_of(writer, root), "a leftover that is younger than the commit", every=0.3)

    assert rows_of(root) == wrote(10)


def remove_leftovers_of(writer: LogWriter, root: Root) -> bool:
    writer.stage(table(row(20)))
    return remove_staged_files(root) > 0


def test_segments_are_trimmed_and_swept_and_the_state_is_read_instead(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, SMALL)
    append(writer, 10, 20, 30, 40)
    compact(root, 30)
    consumers.register(root, Consumer("a-1", "lake", Position(30)))
    before = latest_state(read_range(LogReader(root), Position(0), Position(40)))
    trim = plan_trim(root, AT_ONCE)
    assert trim is not None
    writer.trim(trim.segments, trim.upto)
    gone: list[Root] = list((root / CHANGES).glob("segment=0/*.parquet"))

    assert waiting(root) > 0
    assert vacuum(root, AT_ONCE).files == 3
    assert gone
    assert not any(file.exists() for file in gone)
    assert waiting(root) == 0
    log = LogReader(root)
    assert log.oldest == 30
    assert latest_state(read_range(log, Position(0), Position(40))) == before


def test_small_files_become_one_row_for_row(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    append(writer, 10, 20, 30)
    job = plan_rewrite(LogReader(root).every_file(), min_open=2)
    assert job is not None
    rewrite = rewrite_files(root, job, lambda: False)
    assert rewrite is not None
    assert writer.rewrite(rewrite.new, rewrite.old)
    append(writer, 40)

    assert len(LogReader(root).every_file()) == 2
    assert sorted(rows_of(root)) == wrote(10, 20, 30, 40)


@pytest.mark.parametrize("root", [pytest.param("directory", marks=pytest.mark.slow), "bucket"], ids=str, indirect=True)
def test_new_files_of_the_open_segment_are_gathered_and_a_closed_one_is_settled(root: Root) -> None:
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    append(writer, 10, 20, 30)
    settling = SmallFileRewriter(root, lambda: False, min_open=2)
    assert settling.prepare()
    append(writer, 40)  # beside it, as appends go on
    assert settling.commit_prepared(writer)
    names = [file.path.rpartition("/")[2] for file in LogReader(root).every_file()]
    assert sorted(name.startswith(OPEN_PREFIX) for name in names) == [False, True]
    later = LogWriter(root, LIMITS)  # begins the next segment
    append(later, *range(50, 150, 10))
    append(LogWriter(root, LIMITS), 150)
    until(settling.prepare, "a view of the closed segment", every=PROBE_EVERY)
    assert settling.commit_prepared(LogWriter(root, LIMITS))

    names = [file.path.rpartition("/")[2] for file in LogReader(root).every_file()]
    assert sum(name.startswith(CLOSED_PREFIX) for name in names) == 1
    assert sorted(rows_of(root)) == wrote(*range(10, 160, 10))


@pytest.mark.parametrize("older", range(1, FORMAT))
def test_a_log_of_an_older_format_is_migrated(root: Root, older: int) -> None:
    recorded = DATA / f"format-{older}"
    for file in filter(Path.is_file, recorded.rglob("*")):
        target = root / str(file.relative_to(recorded))
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    before = readable_state(root)
    with pytest.raises(LogFormatUnknown):
        LogWriter(root, LIMITS)
    assert migrate_log(root) == MigrationResult(older, FORMAT)
    assert readable_state(root) == before
    append(LogWriter(root, LIMITS), 140)
    assert verify(root).is_sound


def test_one_of_two_compactors_is_fenced_and_runs_merge(root: Root) -> None:
    append(LogWriter.open(root, IDENTITY, LIMITS), 10, 20, 30)
    first, second = open_compactor(root), open_compactor(root)
    numbers = first.new_run()[0], second.new_run()[0]
    compact(root, 20, writer=second)
    with pytest.raises(LogFenced):
        compact(root, 10, writer=first)
    merged = compact(root, 30, merge=True)

    assert len(set(numbers)) == 2
    assert merged.horizon == 30
    held = read_compacted_state(root)
    assert held is not None
    assert len(held.runs) == 1
    assert latest_state(read_range(LogReader(root), Position(0), Position(30))).keys() == {
        (16384, ("0",)),
        (16384, ("1",)),
    }


def test_files_of_a_run_that_was_never_committed_go(root: Root) -> None:
    append(LogWriter.open(root, IDENTITY, LIMITS), 10)
    _, folder = open_compactor(root).new_run()
    (folder / "x.parquet").write_bytes(b"begun")
    log = LogReader(root)
    _, second = CompactedWriter.open(root, log.identity, log.log_id).new_run()

    assert [place.name for place in (root / COMPACTED).glob("segment=*/x.parquet")] == []
    assert segment_of(second.name) >= segment_of(folder.name)


def test_consumers_are_replaced_listed_and_forgotten(root: Root) -> None:
    LogWriter.open(root, IDENTITY, LIMITS)
    lake = Consumer("a-1", "lake", Position(10), pinned=3, seen_at=7)
    consumers.register(root, lake)
    consumers.register(root, Consumer("b-2", "index", Position(5)))
    consumers.register(root, replace(lake, position=Position(20)))

    assert [(c.name, c.position) for c in consumers.list_consumers(root)] == [("index", 5), ("lake", 20)]
    assert consumers.forget(root, "b-2")
    assert not consumers.forget(root, "b-2")
    assert [c.name for c in consumers.list_consumers(root)] == ["lake"]


def test_an_intent_is_declared_and_fulfilled(root: Root) -> None:
    LogWriter.open(root, IDENTITY, LIMITS)
    assert read_pending_epoch(root) is None
    write_pending_epoch(root, PendingEpoch(2, "restored"))
    assert read_pending_epoch(root) == PendingEpoch(2, "restored")
    remove_pending_epoch(root)
    remove_pending_epoch(root)
    assert read_pending_epoch(root) is None


def test_who_asks_for_a_trim_is_seen_until_it_is_done(root: Root) -> None:
    LogWriter.open(root, IDENTITY, LIMITS)
    request_trim(root)
    asked = root / REQUEST_FILE
    assert asked.exists()
    with maintenance_worker.RetentionWorker(root, AT_ONCE, Event().set):
        until(lambda: not asked.exists(), "a look", seconds=60)
