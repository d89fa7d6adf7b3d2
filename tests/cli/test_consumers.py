"""`cdc consumers`: who reads the log is listed, and forgotten only when nobody needs it, or somebody insists."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.log import consumers
from tests.cli.command import run
from tests.cli.trimmed import Folder


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A log that lacks single changes up to 150 and deletes up to 120."""
    folder = Folder(tmp_path)
    folder.compacted(160)
    folder.compacted(170, floor=120)
    folder.trimmed()
    return folder


def left(folder: Folder) -> list[str]:
    return [consumer.uuid for consumer in consumers.list_consumers(folder.root)]


def test_ls_says_how_far_each_is_and_whether_it_is_there(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    folder.consumer("lake", 190)
    folder.consumer("old", 130, age=3)
    folder.consumer("late", 110, age=200)
    found = run(capsys, "consumers", "ls", "-c", folder.path, "--json").envelope["result"]["consumers"]
    shown = {one["name"]: (one["position"], one["behind_bytes"], one["state"]) for one in found}
    assert shown == {"lake": ("0/BE", 10, "running"), "old": ("0/82", 70, "silent"), "late": ("0/6E", 90, "late")}
    people = run(capsys, "consumers", "ls", "-c", folder.path).output
    assert f"'cdc replay late -c {folder.path}'" in people
    assert "✓ 3 consumers" in people


def test_one_that_is_silent_is_forgotten_and_that_is_audited(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    folder.consumer("lake", 190)
    folder.consumer("old", 130, age=3)
    done = run(capsys, "consumers", "forget", "old", "-c", folder.path, "--json").envelope["result"]
    assert (done["forgotten"], done["consumer"]["position"]) == (True, "0/82")
    assert left(folder) == ["lake"]
    with Catalog.open(load_definition(folder.path).catalog.url) as catalog:
        assert [entry.action for entry in catalog.audit.ls()] == ["consumers.forget"]


def test_one_that_was_heard_of_lately_is_kept_unless_somebody_insists(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    folder.consumer("lake", 190)
    refused = run(capsys, "consumers", "forget", "lake", "-c", folder.path)
    assert (refused.status, "→ add --yes" in refused.errors, left(folder)) == (2, True, ["lake"])
    assert run(capsys, "consumers", "forget", "lake", "--yes", "-c", folder.path).status == 0
    assert left(folder) == []


def test_a_name_that_does_not_say_which_is_refused(capsys: pytest.CaptureFixture[str], folder: Folder) -> None:
    folder.consumer("lake", 190, "one", age=3)
    folder.consumer("lake", 130, "two", age=3)
    several = run(capsys, "consumers", "forget", "lake", "-c", folder.path)
    assert (several.status, "one, two" in several.errors) == (2, True)
    nobody = run(capsys, "consumers", "forget", "pond", "-c", folder.path)
    assert (nobody.status, "choose one of the consumers: lake" in nobody.errors) == (2, True)
    assert run(capsys, "consumers", "forget", "two", "-c", folder.path).status == 0
    assert left(folder) == ["one"]


def test_one_whose_file_is_damaged_is_told_beside_the_others_and_forgotten_by_its_uuid(
    capsys: pytest.CaptureFixture[str], folder: Folder
) -> None:
    folder.consumer("lake", 190)
    (folder.root / "_consumers" / "lost.json").write_text("{", encoding="utf-8")
    found = run(capsys, "consumers", "ls", "-c", folder.path, "--json").envelope["result"]
    assert [one["name"] for one in found["consumers"]] == ["lake"]
    assert [one["subject"] for one in found["problems"]] == ["consumer lost"]
    assert run(capsys, "consumers", "forget", "lost", "-c", folder.path).status == 0
    assert left(folder) == ["lake"]
