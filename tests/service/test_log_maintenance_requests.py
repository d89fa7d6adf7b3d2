"""Maintenance of the log on request: compaction, vacuum, and the check of its newest files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cdc.catalog import Catalog, CommandState, ProcessReport
from cdc.log.trim_plan import REQUEST_FILE
from cdc.service.log_maintenance_requests import check_log, request_compaction, vacuum_log, wait_for_compaction
from tests.cli.trimmed import Folder
from tests.service.pipeline import NAME, definition, new_catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        yield opened


def test_without_an_apply_process_nobody_is_asked_to_compact(catalog: Catalog) -> None:
    assert request_compaction(catalog, NAME, everything=False) is None
    assert catalog.commands.ls(NAME, "compact") == []


def test_a_compaction_is_awaited_until_it_is_finished(catalog: Catalog) -> None:
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running"))
    number = request_compaction(catalog, NAME, everything=True)
    assert number is not None
    catalog.commands.finish(number, {"summary": "compacted 22 rows into 3"})
    done = wait_for_compaction(catalog, NAME, number)
    assert done is not None
    assert (done.payload, done.result) == ({"everything": True}, {"summary": "compacted 22 rows into 3"})


def test_a_compaction_is_withdrawn_when_the_apply_process_has_ended(catalog: Catalog) -> None:
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "running"))
    number = request_compaction(catalog, NAME, everything=False)
    assert number is not None
    catalog.processes.report(ProcessReport(NAME, "apply", 1, "stopped"))
    assert wait_for_compaction(catalog, NAME, number) is None
    withdrawn = catalog.commands.get(number)
    assert withdrawn is not None
    assert withdrawn.state is CommandState.FAILED


def test_a_dry_run_of_a_vacuum_reports_segments_and_requests_nothing(tmp_path: Path) -> None:
    folder = Folder.half(tmp_path)
    folder.consumer("lake", 190)
    report = vacuum_log(definition(tmp_path), dry_run=True)
    assert report.trim is not None
    assert (report.trim.segments, report.trim.oldest) == ((6, 7), "0/AA")
    assert not (folder.root / REQUEST_FILE).exists()


def test_a_check_reports_a_shortened_file(tmp_path: Path) -> None:
    folder = Folder.half(tmp_path)
    assert check_log(definition(tmp_path), 1 << 20).sound
    newest = next((folder.root / "changes").glob("segment=10/*.parquet"))
    newest.write_bytes(newest.read_bytes()[:-1])
    check = check_log(definition(tmp_path), 0)
    assert (check.sound, [finding.damage for finding in check.findings]) == (False, ["size"])
