"""Modes of files: private whatever the umask, unless the operator shares a target."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cdc.capture.startup_checks import exposure_problems
from cdc.catalog import Catalog
from cdc.errors import ConfigError
from cdc.file_modes import PRIVATE_UMASK, configured_umask, is_exposed, product_umask
from tests.fixtures.private import open_to_others, under_umask
from tests.service.pipeline import definition, write_log

UMASKS = pytest.mark.parametrize("umask", [0o000, 0o022, 0o077], ids=oct)


@UMASKS
def test_log_and_catalog_are_private_also_for_a_program_that_uses_the_library(tmp_path: Path, umask: int) -> None:
    with under_umask(umask):
        write_log(tmp_path)
        with Catalog.open(definition(tmp_path).catalog.url) as catalog:
            catalog.pipelines.put("shop", "{}")
            assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700
            files = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.glob("catalog.db*")}
    assert len(files) > 1
    assert set(files.values()) == {0o600}


@UMASKS
def test_a_process_of_ours_makes_nothing_for_others_and_gives_the_umask_back(tmp_path: Path, umask: int) -> None:
    with under_umask(umask):
        with product_umask():
            (tmp_path / "lake").mkdir()
            (tmp_path / "lake" / "part").touch()
        assert os.umask(umask) == umask
    assert open_to_others(tmp_path / "lake") == []


def test_an_operator_shares_what_is_no_log_and_no_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CDC_UMASK", "0027")
    with product_umask():
        (tmp_path / "lake").mkdir()
        write_log(tmp_path)
    assert stat.S_IMODE((tmp_path / "lake").stat().st_mode) == 0o750
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o700


@pytest.mark.parametrize("text", ["27", "0999", "rwx", "-027", "00027"])
def test_a_umask_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("CDC_UMASK", text)
    with pytest.raises(ConfigError, match="three octal digits"):
        configured_umask()


def test_without_a_wish_of_the_operator_the_umask_is_private(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CDC_UMASK", raising=False)
    assert configured_umask() == PRIVATE_UMASK


def test_a_log_of_an_older_version_is_reported_with_the_command_that_closes_it(tmp_path: Path) -> None:
    for above in (tmp_path, *tmp_path.parents):
        if above.owner() == tmp_path.owner() and not above.stat().st_mode & 0o011:
            above.chmod(0o711)
    write_log(tmp_path)
    with Catalog.open(definition(tmp_path).catalog.url):
        pass
    assert exposure_problems(definition(tmp_path)) == []
    (tmp_path / "log").chmod(0o755)
    (tmp_path / "catalog.db").chmod(0o644)
    found = exposure_problems(definition(tmp_path))
    assert [(problem.subject, problem.code, problem.fatal) for problem in found] == [
        ("log", "CDC-4012", False),
        ("catalog", "CDC-4012", False),
    ]
    for problem in found:
        assert os.system(problem.message.partition("run ")[2]) == 0
    assert exposure_problems(definition(tmp_path)) == []


def test_what_lies_below_a_closed_directory_is_not_exposed(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    (closed / "log").mkdir(parents=True)
    closed.chmod(0o700)
    (closed / "log").chmod(0o755)
    assert not is_exposed(closed / "log")
