"""Sweep: only what left a table, and only once nobody can be reading it."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.boot_clock import BootTimestamp
from cdc.errors import LogCorrupt
from cdc.log.consumers import Consumer, register
from cdc.log.reader import LogReader
from cdc.log.retired_files import list_removals, record_removal
from cdc.log.trim_plan import Retention
from cdc.log.vacuum import vacuum, waiting
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from tests.log.rows import IDENTITY, info, row, table
from tests.log.simple_compaction import compact, read_range

AT_ONCE = Retention(max_age=3600.0, grace=0.0)
LATER = Retention(max_age=3600.0, grace=3600.0)
HOUR = 3_600_000_000
"""Microseconds."""


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of a log of four segments that is compacted twice and trimmed by two of them."""
    writer = LogWriter.open(tmp_path, IDENTITY, SegmentLimits(size=1, age=3600.0))
    for position in (10, 20, 30, 40):
        writer.commit(writer.stage(table(row(position))), info(position))
    compact(tmp_path, 30, writer=compact(tmp_path, 20), merge=True)
    writer.trim([0, 1], Position(20))
    return writer


def on_disk(root: Path) -> set[Path]:
    return set(root.glob("*/segment=*/*.parquet"))


def test_files_that_left_go_after_their_grace_and_nothing_else_does(writer: LogWriter, tmp_path: Path):
    before, size = on_disk(tmp_path), waiting(tmp_path)
    assert vacuum(tmp_path, LATER).files == 0
    assert on_disk(tmp_path) == before
    swept = vacuum(tmp_path, AT_ONCE)
    assert (swept.files, swept.size) == (3, size)
    assert len(before - on_disk(tmp_path)) == 3
    assert [r["position"] for r in read_range(LogReader(tmp_path), Position(0), Position(40))] == [30, 40]
    assert (list_removals(tmp_path), waiting(tmp_path), vacuum(tmp_path, AT_ONCE).files) == ({}, 0, 0)


@pytest.mark.usefixtures("writer")
def test_the_grace_is_counted_from_the_first_sweep_that_saw_them_gone(tmp_path: Path):
    vacuum(tmp_path, LATER)
    for file in list_removals(tmp_path):
        fields = json.loads(file.read_text())
        assert fields["seen_at"] <= time.time() * 1_000_000
        file.write_text(json.dumps(fields | {name: fields[name] - HOUR for name in ("seen_at", "up_us")}))
    assert vacuum(tmp_path, LATER).files == 3


@pytest.mark.usefixtures("writer")
@pytest.mark.parametrize("moved", [-HOUR, HOUR])
def test_a_clock_that_is_set_meanwhile_ends_no_grace(tmp_path: Path, moved: int):
    vacuum(tmp_path, LATER)
    for file in list_removals(tmp_path):
        fields = json.loads(file.read_text())
        file.write_text(json.dumps(fields | {"seen_at": fields["seen_at"] - moved}))
    assert vacuum(tmp_path, LATER).files == 0


@pytest.mark.usefixtures("writer")
def test_what_was_seen_in_another_life_of_the_machine_has_its_grace_by_the_clock(tmp_path: Path):
    vacuum(tmp_path, LATER)
    for file in list_removals(tmp_path):
        fields = json.loads(file.read_text())
        file.write_text(json.dumps(fields | {"seen_at": fields["seen_at"] - HOUR, "boot": "another"}))
    assert vacuum(tmp_path, LATER).files == 3


@pytest.mark.usefixtures("writer")
def test_a_dry_run_tells_and_changes_nothing(tmp_path: Path):
    before, told = on_disk(tmp_path), {file: file.read_text() for file in list_removals(tmp_path)}
    assert vacuum(tmp_path, AT_ONCE, dry_run=True).files == 3
    assert (on_disk(tmp_path), {file: file.read_text() for file in list_removals(tmp_path)}) == (before, told)


def test_what_is_staged_and_what_a_commit_only_announced_stays(writer: LogWriter, tmp_path: Path):
    staged = writer.stage(table(row(50)))
    held = [Path(file.path) for file in LogReader(tmp_path).every_file()]
    record_removal(tmp_path, "changes", {str(held[0].relative_to(tmp_path / "changes")): 1}, 99)
    vacuum(tmp_path, AT_ONCE)
    assert held[0].exists()
    writer.commit(staged, info(50))
    assert len(read_range(LogReader(tmp_path), Position(20), Position(50))) == 3
    assert len(list_removals(tmp_path)) == 1


@pytest.mark.usefixtures("writer")
def test_runs_that_a_consumer_has_pinned_stay_until_it_is_long_gone(tmp_path: Path):
    pinned = Consumer("c", "lake", Position(0), pinned=1, seen_at=int(time.time() * 1_000_000))
    register(tmp_path, pinned)
    assert vacuum(tmp_path, AT_ONCE).files == 2
    assert vacuum(tmp_path, Retention(max_age=-1.0, grace=0.0)).files == 1


@pytest.mark.usefixtures("writer")
def test_a_clock_that_is_set_meanwhile_takes_no_pin_away(tmp_path: Path):
    now = BootTimestamp.now()
    before = Consumer("c", "lake", Position(0), 1, now.clock_us - 2 * HOUR, now.boot, now.up_us)
    register(tmp_path, before)
    assert vacuum(tmp_path, AT_ONCE).files == 2
    register(tmp_path, replace(before, up_us=now.up_us - 2 * HOUR))
    assert vacuum(tmp_path, AT_ONCE).files == 1


def test_a_second_sweep_beside_the_first_is_no_error(writer: LogWriter, tmp_path: Path):
    left = list_removals(tmp_path)
    vacuum(tmp_path, AT_ONCE)
    for file, found in left.items():
        found.write(file)
    assert vacuum(tmp_path, AT_ONCE).files == 0
    assert list_removals(tmp_path) == {}


@pytest.mark.usefixtures("writer")
def test_a_note_that_cannot_be_read_deletes_nothing(tmp_path: Path):
    before = on_disk(tmp_path)
    next(iter(list_removals(tmp_path))).write_text("{")
    with pytest.raises(LogCorrupt, match="_leaving"):
        vacuum(tmp_path, AT_ONCE)
    assert on_disk(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "path"),
    [("changes", "../mine.parquet"), (".", "segment=1/x.parquet"), ("changes", "segment=0/../../mine.parquet")],
)
@pytest.mark.usefixtures("writer")
def test_a_note_that_leads_out_of_the_log_is_refused(tmp_path: Path, name: str, path: str):
    (tmp_path / "mine.parquet").touch()
    fields = {"table": name, "version": 1, "paths": [path], "seen_at": 0}
    next(iter(list_removals(tmp_path))).write_text(json.dumps(fields))
    with pytest.raises(LogCorrupt):
        vacuum(tmp_path, AT_ONCE)
    assert (tmp_path / "mine.parquet").exists()
