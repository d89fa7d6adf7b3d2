"""`cdc log ls|compact|gc`, and `cdc log inspect` and `cdc tail` where changes are no longer there one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.commands import COMPACT
from cdc.config import load_definition
from cdc.log.reader import LogReader
from cdc.log.trim_plan import REQUEST_FILE
from tests.cli.command import run, spawn
from tests.cli.trimmed import Folder
from tests.cli.whole_log import whole_log_definition


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def asked(capsys: pytest.CaptureFixture[str], folder: Folder, *command: str) -> dict[str, Any]:
    outcome = run(capsys, *command, "-c", folder.path, "--json")
    assert outcome.status == 0, outcome.output
    result: dict[str, Any] = outcome.envelope["result"]
    return result


def test_ls_of_a_log_that_was_never_compacted_has_no_runs(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    found = asked(capsys, folder, "log", "ls")
    assert len(found["segments"]) == 11
    assert (found["horizon"], found["floor"], found["oldest"], found["runs"]) == (None, None, None, [])


def test_ls_shows_runs_horizon_floor_and_oldest(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    folder.compacted(160)
    folder.compacted(170, floor=120)
    folder.trimmed()
    found = asked(capsys, folder, "log", "ls")
    assert (found["horizon"], found["floor"], found["oldest"]) == ("0/AA", "0/78", "0/96")
    (run_line,) = found["runs"]
    assert (run_line["rows"], run_line["files"]) == (3, 2)
    assert found["compacted_bytes"] == run_line["bytes"] > 0
    assert found["changes_bytes"] == sum(segment["bytes"] for segment in found["segments"])
    assert found["leaving_bytes"] > 0
    assert [segment["first"] for segment in found["segments"]] == ["0/A0", "0/AA", "0/B4", "0/BE", "0/C8"]
    people = run(capsys, "log", "ls", "-c", folder.path).output
    assert "compacted up to 0/AA" in people
    assert "every change above 0/96 is still a single change" in people
    assert "tombstones up to 0/78 are removed" in people


def test_gc_says_what_may_go_and_a_dry_run_touches_nothing(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    folder.compacted(150)
    folder.consumer("lake", 130)
    before = sorted(folder.root.rglob("*"))
    found = asked(capsys, folder, "log", "gc", "--dry-run")
    assert found["trim"] == {"segments": [0, 1, 2, 3, 4, 5], "oldest": "0/96"}  # the commits are of 2023: none waits
    assert sorted(folder.root.rglob("*")) == before
    assert "can be removed" in run(capsys, "log", "gc", "--dry-run", "-c", folder.path).output


def test_gc_asks_the_reader_to_trim_and_removes_files_after_their_grace(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    folder.compacted(150)
    assert asked(capsys, folder, "log", "gc")["trim"] is not None
    assert (folder.root / REQUEST_FILE).exists()
    folder.trimmed()
    assert asked(capsys, folder, "log", "gc", "--dry-run")["files"] == 6
    left = asked(capsys, folder, "log", "gc")
    assert (left["files"], left["leaving_bytes"], left["trim"]) == (6, 0, None)
    assert left["bytes"] > 0
    assert not list((folder.root / "changes").glob("segment=0/*"))
    assert LogReader(folder.root).schemas()


def test_compact_does_it_here_while_no_apply_process_runs(folder: Folder) -> None:
    outcome = spawn("log", "compact", "-c", folder.path)
    assert outcome.status == 0, outcome.errors
    assert "up to 0/BE" in outcome.output  # the current segment stays as it is
    outcome = spawn("log", "compact", "--all", "-c", folder.path, "--json")
    assert outcome.status == 0, outcome.errors
    assert outcome.envelope["command"] == "log compact"
    assert outcome.envelope["result"]["horizon"] == "0/C8"
    assert "up to 0/C8" in outcome.envelope["summary"]


@contextmanager
def applying(folder: Folder, result: dict[str, Any], *, ok: bool) -> Iterator[list[dict[str, Any]]]:
    """An apply process that answers every wish to compact; what it was asked for."""
    stop, wishes = Event(), list[dict[str, Any]]()
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        catalog.processes.report(ProcessReport("shop", "apply", 1, "running"))

        def answer() -> None:
            while not stop.wait(0.01):
                for command in catalog.commands.pending("shop", COMPACT):
                    wishes.append(command.payload)
                    catalog.commands.finish(command.id, result, ok=ok)

        thread = Thread(target=answer)
        thread.start()
        try:
            yield wishes
        finally:
            stop.set()
            thread.join()


def test_compact_asks_the_apply_process_that_runs(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    with applying(folder, {"outcome": {"horizon": "0/C8"}, "summary": "compacted 22 rows into 3"}, ok=True) as wishes:
        assert asked(capsys, folder, "log", "compact", "--all") == {"horizon": "0/C8"}
        assert "compacted 22 rows into 3" in run(capsys, "log", "compact", "-c", folder.path).output
    assert wishes == [{"everything": True}, {"everything": False}]


def test_what_the_apply_process_could_not_do_is_an_error(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    error = {"code": "CDC-4002", "message": "a file cannot be read", "suggestion": "look at it"}
    with applying(folder, {"error": error}, ok=False):
        outcome = run(capsys, "log", "compact", "-c", folder.path, "--json")
        people = run(capsys, "log", "compact", "-c", folder.path)
    assert (outcome.status, outcome.envelope["ok"]) == (1, False)
    assert outcome.envelope["error"]["code"] == "CDC-4002"
    assert (people.status, "→ look at it" in people.output) == (1, True)


TRIMMED = [
    ("tail", "orders", "--since", "0/96"),
    ("tail", "orders", "--since", "0/1"),
    ("tail", "orders", "--since", "2023-11-14T22:13:20.000150Z"),
    ("log", "inspect", "0/96"),
    ("log", "inspect", "0/78"),
]


def test_single_changes_that_are_gone_are_not_passed_over_and_those_that_are_left_are_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = Folder.half(tmp_path)
    for command in TRIMMED:
        outcome = run(capsys, *command, "-c", folder.path, "--json")
        error = outcome.envelope["error"]
        assert (outcome.status, error["code"], "up to 0/96" in error["message"]) == (1, "CDC-4004", True), command
        assert error["suggestion"]

    def shown(*options: str) -> list[str]:
        return [change["position"] for change in asked(capsys, folder, "tail", "orders", *options)["changes"]]

    left = ["0/A0", "0/AA", "0/B4", "0/BE", "0/C8"]
    assert shown("--since", "0/97") == shown() == sorted(left * 2)
    assert shown("--since", "2023-11-14T22:13:20.000160Z") == sorted(left * 2)
    assert len(asked(capsys, folder, "log", "inspect", "0/A0")["changes"]) == 2
    # inspect counts what the log has, and names the oldest position
    found = asked(capsys, folder, "log", "inspect")
    assert found["oldest"] == "0/96"
    assert found["tables"] == {"shop.orders": {"c": 8, "s": 1}}  # two of the horizon, and three times two behind it


@pytest.fixture(name="whole")
def _whole(tmp_path: Path) -> Path:
    return whole_log_definition(tmp_path)


def test_gc_removes_a_file_that_belongs_to_nobody(capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    stray = whole.parent / "log" / "changes" / "segment=3" / "stray.parquet"
    stray.write_bytes(b"x")
    os.utime(stray, (1, 1))
    outcome = run(capsys, "log", "verify", "-c", whole)
    assert (outcome.status, "cdc log gc" in outcome.output) == (0, True)
    assert run(capsys, "log", "gc", "-c", whole).status == 0
    assert not stray.exists()
