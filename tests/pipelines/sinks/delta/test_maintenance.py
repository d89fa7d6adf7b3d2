"""Maintenance of Delta targets: few files, no files that nobody needs, every kept cut complete."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from structlog.testing import capture_logs

from cdc.config import SinkRule
from cdc.delta_protocol.deletion_vectors import FOLDER
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.delta_target import APP_ID, DeltaTarget
from pipelines.sinks.delta.maintenance import (
    AT_ONCE,
    COMPACT_ABOVE,
    READ_AT_ONCE,
    UNKNOWN_FILE_AGE,
    TableFiles,
    TargetMaintenance,
    UpkeepSettings,
)
from pipelines.sinks.delta.published_cuts_table import KeptCut
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.delta.small_files import add_small_files
from tests.pipelines.sinks.maintained_sink import Clock, MaintainedSink

AFTER = 100.0


def whole(files: TableFiles, listed: set[int], now: float, versions: list[frozenset[str]]) -> frozenset[str]:
    """What is needed, once all that has to be is read."""
    while (found := files.needed(listed, now, AFTER, versions.__getitem__)) is None:
        pass
    return found


def test_versions_are_read_some_at_a_time_and_each_once():
    files, read = TableFiles(), list[int]()

    def files_of(version: int) -> frozenset[str]:
        read.append(version)
        return frozenset({str(version)})

    versions = range(READ_AT_ONCE * 2 + 1)
    assert files.needed(versions, 0.0, AFTER, files_of) == frozenset()
    assert files.needed(versions, AFTER, AFTER, files_of) is None
    assert len(read) == READ_AT_ONCE
    assert files.needed(versions, AFTER, AFTER, files_of) is None
    assert files.needed(versions, AFTER, AFTER, files_of) == frozenset(map(str, versions))
    assert sorted(read) == list(versions)


@pytest.mark.parametrize("seed", range(20))
def test_whatever_a_listed_version_or_the_newest_one_has_is_never_removed(seed: int):
    """A model: versions replace files, cuts list versions and forget them again, looks come whenever they like."""
    random = Random(seed)
    files, listed, versions, on_disk, now = TableFiles(), set[int](), [frozenset[str]()], set[str](), 0.0
    for step in range(40):
        now += random.choice([0.1, 10.0, AFTER / 4, AFTER / 2, AFTER])
        if random.random() < 0.7:
            kept = {path for path in versions[-1] if random.random() < 0.6}
            versions.append(frozenset(kept | {f"f{step}"}))
            files.known |= versions[-1]
            on_disk.add(f"f{step}")
        if random.random() < 0.7:
            listed.add(len(versions) - 1)
        if random.random() < 0.5:  # always the newest cut stays
            listed -= {version for version in listed if random.random() < 0.5} - {max(listed, default=0)}
        needed = whole(files, listed, now, versions) | versions[-1]
        on_disk -= set(files.removable(dict.fromkeys(on_disk, now), needed, now, AFTER))

        assert versions[-1] <= on_disk
        for version in listed:
            assert versions[version] <= on_disk
    for _ in range(3):  # nothing that nobody needs stays for ever
        now += AFTER
        needed = whole(files, listed, now, versions) | versions[-1]
        on_disk -= set(files.removable(dict.fromkeys(on_disk, now), needed, now, AFTER))
    assert on_disk == needed


def test_a_file_that_the_driver_never_saw_in_the_table_stays_a_day(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=AFTER))
    upkept.round()
    foreign, old = Path(upkept.uri, "foreign.parquet"), Path(upkept.uri, "old.parquet")
    for path in (foreign, old):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    for _ in range(3):
        upkept.clock.now += AFTER
        upkept.look()

    assert foreign.exists()
    assert not old.exists()
    os.utime(foreign, (0, foreign.stat().st_mtime - UNKNOWN_FILE_AGE))
    upkept.clock.now += AFTER
    upkept.look()
    assert not foreign.exists()


def test_a_file_of_a_machine_whose_clock_is_ahead_goes_after_a_day_unless_the_table_has_it(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=AFTER))
    upkept.round()
    orphan, (live,) = Path(upkept.uri, "orphan.parquet"), Path(upkept.uri).glob("*.parquet")
    orphan.write_bytes(b"")
    for path in (orphan, live):
        os.utime(path, (0, path.stat().st_mtime + 400 * UNKNOWN_FILE_AGE))
    for passed in (AFTER, AFTER, UNKNOWN_FILE_AGE):
        assert orphan.exists()
        upkept.clock.now += passed
        upkept.look()
    assert not orphan.exists()
    assert upkept.items() == upkept.expected(1)


def test_many_small_files_become_few_and_the_rows_stay(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1000, vacuum_after=1000))
    upkept.round()
    add_small_files(upkept.uri, pa.table(DeltaTable(upkept.uri).scan()), COMPACT_ABOVE + 5)
    before = upkept.items()
    assert len(before) == upkept.live() == COMPACT_ABOVE + 6
    upkept.look()

    assert upkept.live() == 1
    assert upkept.items() == before


def test_what_no_kept_cut_needs_goes_and_every_kept_cut_stays_whole(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=10, vacuum_after=AFTER))
    upkept.round()
    handed = upkept.applied()  # a version between two cuts, which somebody holds
    assert handed.version is not None
    upkept.upkeep.pin("held", {upkept.uri: handed.version})
    for _ in range(4):
        upkept.look()
        upkept.clock.now += 20
        upkept.round()
        upkept.applied()
    many = upkept.files()
    for _ in range(3):
        upkept.clock.now += AFTER
        upkept.look()

    assert upkept.assert_every_kept_cut_is_whole() == 5
    assert upkept.items(handed.version) == upkept.expected(2)
    assert upkept.files() == upkept.needed(handed.version) < many
    upkept.upkeep.release("held")
    for _ in range(2):
        upkept.clock.now += AFTER
        upkept.look()
    assert upkept.assert_every_kept_cut_is_whole() == 5
    assert upkept.files() == upkept.needed()


def test_vectors_that_no_kept_cut_needs_are_removed_and_every_kept_cut_stays_whole(tmp_path: Path) -> None:
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=10, vacuum_after=AFTER), writer=Writer.INDEXED)
    for _ in range(5):
        upkept.clock.now += 20
        upkept.round()
        upkept.applied()
    vectors, cuts = set(Path(upkept.uri, FOLDER).iterdir()), upkept.assert_every_kept_cut_is_whole()
    for _ in range(6):
        upkept.clock.now += AFTER
        upkept.look()
    left = {path for path in vectors if path.exists()}

    assert upkept.assert_every_kept_cut_is_whole() == cuts
    assert upkept.items() == upkept.expected(10)
    assert set() < left < vectors


def test_a_rewrite_that_fails_is_reported_for_its_target_and_repeated_later(tmp_path: Path) -> None:
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=10, vacuum_after=AFTER), writer=Writer.INDEXED)
    upkept.applied()
    add_small_files(upkept.uri, pa.table(DeltaTable(upkept.uri).scan()), COMPACT_ABOVE)
    cuts = [KeptCut(0, Published(1, 1, {ORDERS.relation: upkept.applied()}), "")]
    rewriter, target = upkept.sink.parts.rewriter, DeltaTarget.open(upkept.uri)
    assert target is not None
    away = [path.rename(path.with_suffix(".away")) for path in Path(upkept.uri).glob("*.parquet")]
    with capture_logs() as logs:
        while not logs:
            upkept.upkeep.turn(cuts, {upkept.uri: target})
        for _ in range(3):
            upkept.upkeep.turn(cuts, {upkept.uri: target})
    assert [(entry["target"], "FileNotFoundError" in entry["reason"]) for entry in logs] == [(upkept.uri, True)]
    assert not rewriter.is_busy()
    for path in away:
        path.rename(path.with_suffix(".parquet"))
    upkept.clock.now += 10
    upkept.upkeep.turn(cuts, {upkept.uri: target})

    assert rewriter.is_busy()


def test_a_table_that_is_being_made_inside_it_is_left_alone(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=0))
    upkept.round()
    staged, left = Path(upkept.uri, "replay-1"), Path(upkept.uri, "replay-0")
    write_deltalake(str(staged), pa.table({"id": [1]}))
    left.mkdir()
    for path in (staged / "being-written.parquet", left / "part-0.parquet"):
        path.write_bytes(b"")
        os.utime(path, (0, 0))
    upkept.clock.now += 1
    upkept.look()

    assert len(list(staged.glob("*.parquet"))) == 2
    assert not list(left.glob("*.parquet"))


def test_a_table_that_cannot_be_compacted_still_loses_what_nobody_needs(tmp_path: Path):
    uri, clock = str(tmp_path / "table"), Clock()
    mapped = {"delta.columnMapping.mode": "name", APP_ID: "target-1"}  # delta-rs does not compact such a table
    columns = pa.schema([("id", pa.int64())])
    DeltaTable.create(uri, columns, configuration=mapped, raise_if_key_not_exists=False)
    add_small_files(uri, pa.table({"id": [1]}), COMPACT_ABOVE + 1)
    target, upkeep = (
        DeltaTarget(uri, DeltaTable(uri)),
        TargetMaintenance(UpkeepSettings(every=1, vacuum_after=0), clock),
    )
    record = TableRecord(1, "shop.orders", uri, 10, target.version, "streaming")
    cuts = [KeptCut.of(1, Published(10, 10, {1: record}))]
    waste = tmp_path / "table" / "waste.parquet"
    waste.touch()
    os.utime(waste, (0, 0))
    for _ in range(3):
        clock.now += 10
        upkeep.turn(cuts, {uri: target})

    assert target.files()[0] == COMPACT_ABOVE + 1
    assert not waste.exists()


def test_the_log_begins_at_the_oldest_kept_cut(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=0, keep_commits=1, brief=-1))
    upkept.applied()
    upkept.applied()
    oldest, *_ = [upkept.round() for _ in range(3)]
    DeltaTable(upkept.uri).create_checkpoint()
    upkept.clock.now += 1
    upkept.look()

    assert min(upkept.versions()) == oldest.version
    assert upkept.assert_every_kept_cut_is_whole() == 3
    assert DeltaTable(upkept.uri).metadata().configuration["delta.enableExpiredLogCleanup"] == "false"


def test_where_the_files_are_not_where_the_table_says_nothing_is_removed(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=0))
    upkept.round()
    upkept.round()
    (live,) = DeltaTable(upkept.uri).file_uris()
    away = Path(live).rename(f"{live}.away.parquet")
    os.utime(away, (0, 0))
    before = upkept.files()
    upkept.clock.now += 1
    upkept.look()

    assert upkept.files() == before


def test_a_look_removes_so_many_files_at_most_and_goes_on_the_next_time(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=50, vacuum_after=0))
    upkept.round()
    for number in range(AT_ONCE + 3):
        path = Path(upkept.uri, f"{number}.parquet")
        path.touch()
        os.utime(path, (0, 0))
    upkept.clock.now += 60
    upkept.look()
    assert len(upkept.files()) == 1 + 3
    upkept.look()
    assert len(upkept.files()) == 1


def test_after_a_job_the_next_one_waits_nine_times_as_long_as_it_took(tmp_path: Path):
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1, vacuum_after=0))

    class Slow(DeltaTarget):
        """A target whose every refresh takes ten seconds."""

        def refresh(self) -> None:
            upkept.clock.now += 10
            super().refresh()

    upkept.round()
    upkept.clock.now += 1
    found: list[float] = []
    for _ in range(20):
        before = upkept.clock.now
        upkept.look(Slow)
        if upkept.clock.now > before:
            found.append(before)
        upkept.clock.now += 10
    assert [after - before for before, after in pairwise(found)] == [100.0, 100.0]


def test_of_a_target_of_many_tables_what_no_cut_needs_is_removed_and_nothing_else(tmp_path: Path):
    """Its folders have names that are hidden elsewhere; one of its tables has not changed since an early version."""
    rule = SinkRule.model_validate({"match": "shop.*", "path": f"{tmp_path}/all", "merge_tables": True})
    settings = DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", Writer.COPY_ON_WRITE, rules=(rule,))
    sink, clock = DeltaSink(settings), Clock()
    sink.open("log-1")
    other = replace(ORDERS, relation=2, oid=2, name="items")
    records = {2: sink.apply(batch([put(1, "still", 10)], 0, 10, other))}
    upkeep, uri = TargetMaintenance(UpkeepSettings(every=1, vacuum_after=0, keep_commits=50), clock), f"{tmp_path}/all"
    cuts: list[KeptCut] = []
    for upto in range(10, 80, 10):
        records[1] = sink.apply(batch([put(1, str(upto), upto)], upto - 10, upto, replace(ORDERS, relation=1)))
        cuts = [*cuts, KeptCut.of(upto, Published(upto, upto, dict(records)))][-2:]
        clock.now += 10
        target = DeltaTarget.open(uri)
        assert target is not None
        upkeep.turn(cuts, {uri: target})

    kept = [DeltaTable(uri, version=cut.record.versions[uri]).file_uris() for cut in cuts]
    files = {path for path in Path(uri).rglob("*.parquet") if path.parent.name != "_delta_log"}
    assert files == {Path(file) for files in kept for file in files}
    assert [len(files) for files in kept] == [2, 2]


STRANGE = pa.table({"id": [1, 2], "theirs": ["a", "b"]})


def test_upkeep_leaves_a_strangers_table_alone(tmp_path: Path) -> None:
    upkept = MaintainedSink(tmp_path, UpkeepSettings(every=1.0, vacuum_after=1.0, retain=0.0))
    upkept.round()
    upkept.sink.close()
    shutil.rmtree(upkept.uri)
    write_deltalake(upkept.uri, STRANGE)
    for _ in range(3):
        upkept.clock.now += 100.0
        upkept.look()

    assert DeltaTable(upkept.uri).version() == 0
