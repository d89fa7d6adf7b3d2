"""Verify: what is damaged in a log is found and named, and everything else is looked at all the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import pyarrow.parquet as pq
import pytest

from cdc.errors import LogCorrupt, LogError, LogFormatUnknown
from cdc.log import consumers, parquet_check, retired_files
from cdc.log.audit.delta_tables import read_log_tables
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.audit.rows import CommitClaim, FileContents
from cdc.log.audit.verify import AuditReport, AuditScope, verify
from cdc.log.consumers import Consumer
from cdc.log.disk_format import FORMAT
from cdc.log.reader import LogReader
from cdc.log.table_io import open_table
from cdc.log.trim_plan import Retention
from cdc.log.vacuum import remove_orphan_files, vacuum
from cdc.log.writer import LogWriter
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from tests.log.file_damage import flip_byte, page_of
from tests.log.rows import IDENTITY, info, row, table
from tests.log.sample_log import (
    ITEMS,
    ORDERS,
    RESTORED,
    SEGMENT_PER_FILE,
    build_sample_log,
    commit_rows,
    item_row,
    schema_row,
    schema_version,
)

DATA = Path(__file__).parents[1] / "data"


@pytest.fixture(name="whole", scope="module")
def _whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole") / "log"
    build_sample_log(root)
    return root


@pytest.fixture(name="root")
def _root(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "log"))


@pytest.fixture(name="writer")
def _writer(tmp_path: Path) -> LogWriter:
    """Of a log that tells of one table and holds a row of it, for rows that no reader would write."""
    writer = LogWriter.open(tmp_path / "log", IDENTITY, SEGMENT_PER_FILE)
    commit_rows(writer, schema_row(100, 0, schema_version(ORDERS, "name")), row(100, 1))
    return writer


def claim_at(root: Path, position: int, *, schemas: bool = False) -> CommitClaim:
    """The file of `changes` that begins at a position."""
    claims = read_log_tables(root).claims
    return next(c for c in claims if (c.first, c.has_schemas_only) == (position, schemas) and c.table == "changes")


def wrong(report: AuditReport) -> list[AuditFinding]:
    return [finding for finding in report.findings if not finding.is_harmless]


def the_one(root: Path, scope: AuditScope | None = None) -> AuditFinding:
    """What is wrong, if it is one thing."""
    (found,) = wrong(verify(root, scope))
    assert found.remedy
    return found


def test_a_log_that_has_lived_has_no_findings(root: Path):
    report = verify(root)
    assert report.findings == ()
    assert (report.read, report.rows) == (report.files, 27)
    assert (report.durable, report.horizon) == (RESTORED + 10, 120)


def test_a_flipped_byte_is_found_with_file_positions_and_tables(root: Path):
    claim = claim_at(root, 140)
    flip_byte(root / claim.path, page_of(root / claim.path, "after"))
    found = the_one(root)
    assert (found.damage, found.file) == (DamageKind.UNREADABLE, claim.path)
    assert (found.first, found.last, found.tables) == (140, 140, ("shop.items", "shop.orders"))
    assert "columns after" in found.message


def test_where_the_places_are_flipped_the_commit_tells_them(root: Path):
    claim = claim_at(root, 120)
    for column in ("position", "relation"):
        flip_byte(root / claim.path, page_of(root / claim.path, column))
    found = the_one(root)
    assert (found.file, found.first, found.last, found.tables) == (claim.path, 120, 120, ("shop.orders",))


def test_any_flipped_byte_is_found_or_changes_nothing_that_is_read(root: Path, tmp_path: Path):
    claim, random = claim_at(root, 140), Random(7)
    original = pq.ParquetFile(root / claim.path).read().cast(LOG_SCHEMA)
    copy, seen = tmp_path / "flipped", 0
    for at in random.sample(range(claim.size), 120):
        shutil.copy(root / claim.path, copy)
        flip_byte(copy, at, 1 << random.randrange(8))
        contents = FileContents()
        if parquet_check.read(copy, contents.add).unread or list(contents.faults(claim)):
            seen += 1
        else:
            assert pq.ParquetFile(copy).read().cast(LOG_SCHEMA).equals(original)
    assert seen > 40


def flip_footer(path: Path) -> None:
    flip_byte(path, -6)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("harm", "damage"),
    [(flip_footer, DamageKind.UNREADABLE), (truncate, DamageKind.SIZE), (Path.unlink, DamageKind.MISSING)],
    ids=["footer", "truncated", "missing"],
)
@pytest.mark.parametrize("table", ["changes", "compacted"])
def test_a_damaged_file_is_named_with_what_it_held(
    root: Path, table: str, harm: Callable[[Path], None], damage: DamageKind
):
    claims = [c for c in read_log_tables(root).claims if c.table == table and not c.has_schemas_only]
    claim = min(claims, key=lambda c: c.first)
    harm(root / claim.path)
    found = the_one(root)
    assert (found.damage, found.file, found.first, found.last) == (damage, claim.path, claim.first, claim.last)
    assert "shop.orders" in found.tables


def test_a_file_of_yesterday_under_the_same_name_is_found(root: Path):
    claim, other = claim_at(root, 120), claim_at(root, RESTORED + 10)
    shutil.copy(root / other.path, root / claim.path)
    found = the_one(root)
    assert (found.damage, found.file, found.first) == (DamageKind.SIZE, claim.path, 120)


def test_a_file_of_the_same_length_with_other_rows_is_found(writer: LogWriter, tmp_path: Path):
    root = tmp_path / "log"
    for position in range(110, 116):
        commit_rows(writer, row(position))
    claims = sorted(read_log_tables(root).claims, key=lambda claim: claim.size)
    first, second = next(pair for pair in pairwise(claims) if pair[0].size == pair[1].size)
    shutil.copy(root / first.path, root / second.path)
    found = wrong(verify(root))
    assert {f.damage for f in found if f.file == second.path} >= {DamageKind.CONTENTS, DamageKind.RANGE}


def test_everything_that_is_not_damaged_is_looked_at_all_the_same(root: Path):
    first, second = claim_at(root, 120), claim_at(root, RESTORED + 10)
    (root / first.path).unlink()
    flip_byte(root / second.path, page_of(root / second.path, "key"))
    report = verify(root)
    assert {(f.damage, f.file) for f in report.findings} == {
        (DamageKind.MISSING, first.path),
        (DamageKind.UNREADABLE, second.path),
    }
    assert report.read == report.files - 1


def test_a_missing_commit_is_named(root: Path):
    (root / "changes" / "_delta_log" / f"{3:020d}.json").unlink()
    found = wrong(verify(root))
    assert found[0].file == "changes/_delta_log/00000000000000000003.json"
    assert found[0].message == "the commit is missing"
    assert {f.damage for f in found} == {DamageKind.COMMIT}


def test_where_one_table_cannot_be_opened_the_other_is_looked_at(root: Path):
    (root / "changes" / "_delta_log" / f"{3:020d}.json").unlink()
    claim = next(c for c in read_log_tables(root).claims if not c.has_schemas_only)
    flip_byte(root / claim.path, page_of(root / claim.path, "after"))
    assert (DamageKind.UNREADABLE, claim.path) in {(f.damage, f.file) for f in verify(root).findings}


def test_a_commit_that_cannot_be_read_is_named(root: Path):
    commit = root / "compacted" / "_delta_log" / f"{1:020d}.json"
    truncate(commit)
    assert wrong(verify(root))[0].file == "compacted/_delta_log/00000000000000000001.json"


def test_a_truncated_checkpoint_is_named(root: Path):
    open_table(root / "changes").create_checkpoint()
    (checkpoint,) = (root / "changes" / "_delta_log").glob("*.checkpoint.parquet")
    assert verify(root).is_sound
    truncate(checkpoint)
    assert wrong(verify(root))[0].file == f"changes/_delta_log/{checkpoint.name}"


def test_what_is_behind_a_checkpoint_needs_no_commits(root: Path):
    open_table(root / "changes").create_checkpoint()
    for commit in sorted((root / "changes" / "_delta_log").glob("*.json"))[:4]:
        commit.unlink()
    assert verify(root).is_sound


def test_a_file_that_belongs_to_nothing_is_harmless_and_goes(root: Path):
    stray = root / "changes" / "segment=5" / "somebody.parquet"
    shutil.copy(root / claim_at(root, 120).path, stray)
    os.utime(stray, (1, 1))
    report = verify(root)
    (found,) = report.findings
    assert (found.damage, found.file, report.is_sound) == (
        DamageKind.FOREIGN,
        "changes/segment=5/somebody.parquet",
        True,
    )
    assert "cdc log gc" in (found.remedy or "")
    assert remove_orphan_files(root, 3600.0, dry_run=True).files == 1
    assert remove_orphan_files(root, 3600.0).files == 1
    assert verify(root).findings == ()


def test_what_a_writer_has_staged_and_what_left_a_table_belong_to_somebody(root: Path):
    writer = LogWriter.open(root, IDENTITY, SEGMENT_PER_FILE)
    for note in retired_files.list_removals(root).values():
        for path in note.paths:
            os.utime(root / note.table / path, (1, 1))
    writer.stage(table(row(RESTORED + 20)))
    assert verify(root).findings == ()
    assert remove_orphan_files(root, 0.0).files == 0


@pytest.mark.parametrize(
    ("rows", "damage", "words"),
    [
        ([row(110, 0), row(110, 2)], DamageKind.HOLE, "0/6E has missing rows before ordinal 2"),
        ([row(110, 1), row(120, 0)], DamageKind.HOLE, "0/6E has missing rows before ordinal 1"),
        ([row(110, 0), row(110, 1), row(110, 1)], DamageKind.DUPLICATE, "0/6E#1 twice"),
        ([row(110, 1), row(110, 0)], DamageKind.ORDER, "0/6E#0 is out of order"),
        ([row(110), row(130)], DamageKind.RANGE, "contains positions 0/6E to 0/82"),
        ([item_row(110, 0)], DamageKind.VERSION, "the first row of a table comes before the schema row"),
        ([row(110, 0, after=[(1, "1"), (7, "x")])], DamageKind.VERSION, "no schema row of the table has: ids [7]"),
    ],
    ids=["hole", "begins late", "duplicate", "order", "range", "no version", "unknown column"],
)
def test_rows_that_no_reader_would_write_are_found(
    writer: LogWriter, tmp_path: Path, rows: list[dict[str, object]], damage: DamageKind, words: str
):
    commit_rows(writer, *rows, last=120)
    claim = claim_at(tmp_path / "log", 110)
    found = [f for f in wrong(verify(tmp_path / "log")) if f.damage is damage]
    assert found
    assert all(f.file == claim.path for f in found)
    assert words in found[0].message
    assert found[0].first == 110
    assert found[0].tables in {("shop.orders",), (f"relation {ITEMS}",)}


def test_one_place_in_two_files_is_found(writer: LogWriter, tmp_path: Path):
    both = [*writer.stage(table(row(110))), *writer.stage(table(row(110)))]
    writer.commit(both, info(110))
    found = the_one(tmp_path / "log")
    assert (found.damage, found.first, found.message) == (
        DamageKind.DUPLICATE,
        110,
        "transaction 0/6E has two rows with ordinal 0",
    )


def test_a_transaction_may_lie_in_many_files(writer: LogWriter, tmp_path: Path):
    files = [file for n in (2, 0, 1) for file in writer.stage(table(row(110, n)))]
    writer.commit(files, info(110))
    assert verify(tmp_path / "log").findings == ()
    writer.commit([f for n in (2, 0) for f in writer.stage(table(row(120, n)))], info(120))
    assert the_one(tmp_path / "log").damage is DamageKind.HOLE


def test_rows_that_the_commit_does_not_count_are_found(writer: LogWriter, tmp_path: Path):
    file = writer.stage(table(row(110)))[0]
    text = file.statistics.replace('"numRecords": 1', '"numRecords": 2')
    writer.commit([replace(file, statistics=text)], replace(info(110), rows=3))
    found = wrong(verify(tmp_path / "log"))
    assert {(f.damage, f.file.startswith("changes/_delta_log/")) for f in found} == {
        (DamageKind.CONTENTS, False),
        (DamageKind.COMMIT, True),
    }


def test_a_log_of_another_source_is_told_when_somebody_asks(root: Path):
    assert verify(root, AuditScope(system_id="7000")).is_sound
    found = the_one(root, AuditScope(system_id="8000"))
    assert found.damage is DamageKind.SOURCE
    assert "7000" in found.message
    assert "8000" in found.message


def test_a_log_of_a_newer_format_is_refused(root: Path):
    commit = root / "changes" / "_delta_log" / f"{0:020d}.json"
    text = commit.read_text()
    newer = text.replace(rf"\"format\": {FORMAT}", rf"\"format\": {FORMAT + 1}")
    assert newer != text
    commit.write_text(newer)
    with pytest.raises(LogFormatUnknown, match=f"formats 1 to {FORMAT}, but the log has format {FORMAT + 1}"):
        verify(root)


def test_no_log_is_an_error_with_a_remedy(tmp_path: Path):
    with pytest.raises(LogError, match="no change log"):
        verify(tmp_path)


def test_a_compacted_table_of_another_log_is_found(root: Path, tmp_path: Path):
    other = tmp_path / "other"
    build_sample_log(other)
    shutil.rmtree(root / "compacted")
    shutil.copytree(other / "compacted", root / "compacted")
    assert DamageKind.MISFIT in {f.damage for f in wrong(verify(root))}


def test_a_log_that_went_back_to_an_older_copy_is_found_by_who_was_further(root: Path):
    consumers.register(root, Consumer("1", "lake", Position(RESTORED + 50)))
    found = the_one(root)
    assert found.damage is DamageKind.MISFIT
    assert "'lake' has read up to 1:0/64" in found.message


def test_a_compacted_table_that_lost_what_tells_columns_is_found(root: Path):
    claims = read_log_tables(root).claims
    claim = next(c for c in claims if c.table == "compacted" and c.has_schemas_only)
    commits = sorted((root / "compacted" / "_delta_log").glob("*.json"))
    for commit in commits:
        lines = [line for line in commit.read_text().splitlines() if claim.name not in line]
        commit.write_text("\n".join(lines))
    assert DamageKind.VERSION in {f.damage for f in wrong(verify(root))}


def test_files_without_page_checksums_are_told_and_are_no_fault():
    report = verify(DATA / "format-1")
    assert [f.damage for f in report.findings] == [DamageKind.UNCHECKED]
    assert report.is_sound


def test_of_named_tables_only_the_files_are_read(root: Path):
    claim, other = claim_at(root, 120), claim_at(root, 140)
    flip_byte(root / claim.path, page_of(root / claim.path, "after"))
    flip_byte(root / other.path, page_of(root / other.path, "after"))
    report = verify(root, AuditScope(globs=("items",)))
    assert [f.file for f in report.findings] == [other.path]
    assert report.read < report.files


def test_with_a_limit_only_the_newest_files_are_read(root: Path):
    newest = claim_at(root, RESTORED + 10)
    report = verify(root, AuditScope(most=newest.size))
    assert (report.read, report.findings) == (1, ())


def test_what_leaves_the_log_while_it_is_looked_at_is_no_finding(root: Path):
    compact(None, root, upto=Position(140), everything=True)
    writer = LogWriter(root, SEGMENT_PER_FILE)
    asked = Retention(max_age=0.0, grace=0.0)

    def meanwhile(_done: int, _total: int) -> None:
        writer.trim([3, 4, 5, 6], Position(140))
        vacuum(root, asked)

    report = verify(root, progress=meanwhile)
    assert report.findings == ()
    assert report.read < report.files
    assert {claim.first for claim in read_log_tables(root).claims if claim.table == "changes"} == {
        RESTORED,
        RESTORED + 10,
    }


def test_progress_ends_with_all_bytes(root: Path):
    told: list[tuple[int, int]] = []
    report = verify(root, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (report.size, report.size)
    assert told == sorted(told)


def test_who_meets_a_damaged_file_is_told_what_it_held_and_others_go_on(root: Path):
    claim = claim_at(root, 120)
    flip_byte(root / claim.path, page_of(root / claim.path, "after"))
    log = LogReader(root)
    with pytest.raises(LogCorrupt) as met:
        list(log.rows(Position(115), Position(130)))
    assert claim.name in met.value.message
    assert "positions 0/78 to 0/78; tables shop.orders" in met.value.message
    assert "cdc log verify" in met.value.fix
    assert sum(batch.num_rows for batch in log.rows(Position(120), RESTORED)) == 10


def test_a_log_that_cannot_be_opened_is_one_clear_error(root: Path):
    (root / "changes" / "_delta_log" / f"{3:020d}.json").unlink()
    with pytest.raises(LogCorrupt, match="'changes' of the log cannot be opened") as met:
        LogReader(root)
    assert "cdc log verify" in met.value.fix
    with pytest.raises(LogCorrupt, match="'changes' of the log cannot be opened"):
        LogWriter(root, SEGMENT_PER_FILE)
