"""What is told of a log: its segments, its reach, its consumers, and what of it cannot be read."""

from __future__ import annotations

from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from cdc.catalog import ProcessReport
from cdc.errors import LogCorrupt, LogError, LogUnwritable
from cdc.log.reader import LogReader
from cdc.service.log_contents import open_log, segment_lines
from cdc.service.log_sampler import LogSampler
from cdc.service.log_status_reader import find_consumer, log_status
from cdc.service.log_status_records import LogState, LogStatus
from cdc.service.status import pipeline_status
from tests.cli.trimmed import Folder
from tests.fixtures.disk import small_file_system
from tests.service.pipeline import NAME, new_catalog

SOME_TIME = 20.0


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A log that is compacted up to 170 and lacks single changes up to 150, deletes up to 120."""
    folder = Folder(tmp_path)
    folder.compacted(160)
    folder.compacted(170, floor=120)
    folder.trimmed()
    return folder


def told(folder: Folder) -> LogStatus:
    return log_status(folder.root, LogReader(folder.root), datetime.now(UTC), "shop.yaml")


def watched(folder: Folder) -> LogStatus:
    found = LogSampler(folder.root, "shop.yaml").wait(SOME_TIME)
    assert found is not None
    return found


def damage(folder: Folder, table: str) -> None:
    newest = max((folder.root / table / "_delta_log").glob("*.json"))
    newest.write_text("nonsense", encoding="utf-8")


def test_the_log_tells_its_reach_and_what_it_weighs(folder: Folder) -> None:
    log = told(folder)
    assert (log.floor, log.oldest, log.horizon, log.durable) == ("0/78", "0/96", "0/AA", "0/C8")
    assert (log.timeline, log.switch_point) == (1, None)
    assert (log.segment_count, log.file_count, log.row_count) == (5, 5, 10)
    assert (log.horizon_behind_bytes, log.horizon_behind_seconds) == (30, 0.0)
    assert log.oldest_segment is not None
    assert log.newest_segment is not None
    assert (log.oldest_segment.first, log.newest_segment.last) == ("0/A0", "0/C8")
    assert log.oldest_segment.began_at == "2023-11-14T22:13:20+00:00"
    assert log.changes_bytes == sum(segment.bytes for segment in segment_lines(LogReader(folder.root)))
    left = sum(file.stat().st_size for number in range(6) for file in folder.root.glob(f"changes/segment={number}/*"))
    assert log.leaving_bytes is not None
    assert log.leaving_bytes > left > 0  # and the runs that became one
    assert log.problems == ()


def test_the_last_compaction_is_told_with_its_time(folder: Folder) -> None:
    made = told(folder).compaction
    assert made is not None
    assert made.rows == 3
    assert abs((datetime.now(UTC) - datetime.fromisoformat(made.at)).total_seconds()) < 3600


def test_a_consumer_holds_back_what_is_compacted_and_what_it_has_not_passed(folder: Folder) -> None:
    for name, position in (("lake", 200), ("slow", 160), ("events", 165)):
        folder.consumer(name, position)
    log = told(folder)
    found = {line.name: (line.behind_bytes, line.behind_segments, line.holds_bytes) for line in log.consumers}
    # of the two segments up to the horizon everybody has passed 160, and the lake alone 170
    held = next(line.bytes for line in segment_lines(LogReader(folder.root)) if line.last == log.horizon)
    assert found == {"lake": (0, 0, 0), "slow": (40, 4, held), "events": (35, 4, held)}
    assert log.slowest is not None
    assert log.slowest.name == "slow"


def test_time_behind_is_from_change_to_change_whatever_the_clock_says(folder: Folder) -> None:
    hour = 3_600_000_000
    folder.append(300, committed_at=1_700_000_000_000_000 + hour)
    folder.append(310, committed_at=1_700_000_000_000_000 + 3 * hour)
    folder.consumer("lake", 300)
    folder.consumer("slow", 250)
    found = {line.name: line.behind_seconds for line in told(folder).consumers}
    assert found == {"lake": 2 * 3600.0, "slow": 3 * 3600.0}


def test_one_that_is_too_late_is_a_problem_with_both_ways_out(folder: Folder) -> None:
    folder.consumer("late", 110, "a-uuid", age=200)
    (problem,) = told(folder).problems
    assert (problem.subject, problem.code) == ("consumer late", "CDC-4004")
    assert "'cdc replay late -c shop.yaml'" in problem.remedy
    assert "'cdc consumers forget a-uuid -c shop.yaml'" in problem.remedy


def test_a_consumer_that_cannot_be_read_is_told_and_the_others_are_listed(folder: Folder) -> None:
    folder.consumer("lake", 190)
    (folder.root / "_consumers" / "lost.json").write_text("{", encoding="utf-8")
    log = told(folder)
    assert [line.name for line in log.consumers] == ["lake"]
    (problem,) = log.problems
    assert (problem.subject, problem.code) == ("consumer lost", "CDC-4002")
    assert "'cdc consumers forget lost -c shop.yaml'" in problem.remedy
    assert find_consumer(folder.root, "lost").uuid == "lost"


def test_a_compacted_table_that_cannot_be_read_leaves_the_rest_of_an_untrimmed_log(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.compacted()
    folder.consumer("lake", 190)
    damage(folder, "compacted")
    log = told(folder)
    assert (log.state, log.horizon, log.segment_count) == (LogState.READ, None, 11)
    assert [line.name for line in log.consumers] == ["lake"]
    (problem,) = log.problems
    assert problem.code == "CDC-4002"
    assert "table 'compacted'" in problem.message
    assert "'cdc log verify'" in problem.remedy


@pytest.mark.parametrize("table", ["changes", "compacted"])
def test_a_trimmed_log_with_a_damaged_commit_names_the_table(folder: Folder, table: str) -> None:
    damage(folder, table)
    with pytest.raises(LogCorrupt, match=f"table '{table}'"):
        open_log(folder.root)
    log = watched(folder)
    assert log.state is LogState.UNREADABLE
    assert f"table '{table}'" in log.problems[0].message


def test_no_log_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(LogError):
        open_log(tmp_path / "log")
    found = LogSampler(tmp_path / "log").wait(SOME_TIME)
    assert found is not None
    assert (found.state, found.problems[0].code) == (LogState.ABSENT, "CDC-4000")


def test_a_full_disk_is_told_though_no_process_can_report_it(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "small") as small, new_catalog(tmp_path) as catalog:
        folder = Folder(small)
        folder.append(210)
        assert LogUnwritable.code not in {problem.code for problem in told(folder).problems}
        with suppress(OSError), (small / "ballast").open("wb") as ballast:
            while True:
                ballast.write(bytes(4096))
        catalog.processes.report(ProcessReport(NAME, "reader", 1, "running"))
        later = datetime.now(UTC) + timedelta(minutes=1)
        problems = pipeline_status(catalog, NAME, later, told(folder)).problems
        assert (problems[0].subject, problems[0].code) == ("log", LogUnwritable.code)
        assert {one.remedy for one in problems if one.subject in {"reader", "apply"}} == {LogUnwritable.remedy}
