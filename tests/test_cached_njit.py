"""The cache of compiled functions never gives another version's code, whatever is in it and whoever uses it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from shutil import make_archive

import pytest

from tests.fixtures import forked
from tests.fixtures.waiting import until
from tests.source_tree import ROOT

FUNCTION = """
from typing import NamedTuple
import numpy as np
from cdc.cached_njit import cached_njit
from adder.parts import {name}, ADDED
# version {added}
@cached_njit
def add(argument):
    return argument.value + ADDED
"""
PARTS = """
from typing import NamedTuple

ADDED = {added}

class {name}(NamedTuple):
    value: int
"""
CALL = "from adder.adding import add; from adder.parts import {name}; print(add({name}(1)))"
HERE = """
import sys
sys.dont_write_bytecode = True  # a .pyc of the same second and size would hide the new version
sys.path.insert(0, sys.argv[1])
"""
PAUSE_BEFORE_CODE = """
import sys
from pathlib import Path
from numba.core.caching import IndexDataCacheFile

save = IndexDataCacheFile._save_data

def wait_and_save(*arguments):
    Path(sys.argv[1]).touch()
    sys.stdin.read()
    save(*arguments)

IndexDataCacheFile._save_data = wait_and_save
"""


class Package:
    """A package with one compiled function, in versions that differ in a constant and in the name of a class."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.name, self.notes_version = folder, "", False
        (folder / "adder").mkdir()
        (folder / "adder" / "__init__.py").touch()

    def upgrade(self, added: int, name: str = "Number") -> None:
        """Write the files of a version; those that do not change keep their time."""
        self.name = name
        function = FUNCTION.format(name=name, added=added if self.notes_version else 0)
        for file, text in (("adding", function), ("parts", PARTS.format(name=name, added=added))):
            path = self.folder / "adder" / f"{file}.py"
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                path.write_text(text, encoding="utf-8")

    def start(self, before: str = "", arguments: Sequence[str] = ()) -> subprocess.Popen[str]:
        """A process that prints the function of 1."""
        command = [sys.executable, "-c", before + CALL.format(name=self.name), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        # a .pyc of the same second and size would hide the new version
        paths = {"PYTHONPATH": f"{ROOT}:{self.folder}", "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.Popen(command, env=paths, cwd=self.folder, text=True, **pipes)  # type: ignore[call-overload,no-any-return]

    def call(self, code: str = CALL) -> str:
        """What the process prints."""
        ended = forked.run("tests.run_code", HERE + code.format(name=self.name), self.folder)
        return ended.output.strip() or ended.errors


@pytest.fixture(name="package")
def _package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_constant_of_another_file_is_compiled_anew(package: Package) -> None:
    package.upgrade(added=1)
    assert package.call() == "2"
    package.upgrade(added=2)
    assert package.call() == "3"


def test_a_class_with_another_name_is_no_error(package: Package) -> None:
    package.upgrade(added=1, name="Number")
    assert package.call() == "2"
    package.upgrade(added=1, name="Amount")
    assert package.call() == "2"


def test_an_unchanged_package_is_not_compiled_again(package: Package) -> None:
    package.upgrade(added=1)
    assert package.call() == "2"
    code = {path: path.stat().st_mtime_ns for path in package.folder.rglob("*.nb?")}
    assert code
    assert package.call() == "2"
    assert {path: path.stat().st_mtime_ns for path in package.folder.rglob("*.nb?")} == code


@pytest.mark.parametrize(("cache", "stored"), [("new/cache", True), ("adder/__init__.py/cache", False)])
def test_a_package_in_a_zip_file_is_compiled_whether_its_cache_can_be_made_or_not(
    package: Package, cache: str, stored: bool
) -> None:
    package.upgrade(added=1)
    archive = make_archive(str(package.folder / "sent"), "zip", package.folder, "adder")
    folder = package.folder / cache

    code, environment = HERE + CALL.format(name=package.name), {"XDG_CACHE_HOME": str(folder)}
    ended = forked.run("tests.run_code", code, archive, environment=environment)

    assert ended.output.strip() == "2", ended.errors
    assert bool(list(folder.rglob("*.nbc"))) == stored


def test_the_same_package_in_another_zip_file_is_not_compiled_again(package: Package) -> None:
    """Each application of Spark gets the archive in another directory."""
    environment = {"XDG_CACHE_HOME": str(package.folder / "cache")}

    def call_archived(place: str) -> str:
        archive = make_archive(str(package.folder / place / "sent"), "zip", package.folder, "adder")
        code = HERE + CALL.format(name=package.name)
        ended = forked.run("tests.run_code", code, archive, environment=environment)
        return ended.output.strip() or ended.errors

    package.upgrade(added=1)
    assert call_archived("one") == "2"
    code = {path: path.stat().st_mtime_ns for path in package.folder.rglob("*.nb?")}
    assert code
    assert call_archived("two") == "2"
    assert {path: path.stat().st_mtime_ns for path in package.folder.rglob("*.nb?")} == code
    package.upgrade(added=2)
    assert call_archived("one") == "3"


def test_while_a_process_stores_new_code_no_other_one_runs_the_earlier_code(package: Package) -> None:
    """The index names the new code from before that is written, so the lock must keep other processes from reading."""
    package.notes_version = True
    package.upgrade(added=1)
    assert package.call() == "2"
    package.upgrade(added=2)
    storing = package.start(PAUSE_BEFORE_CODE, [str(package.folder / "paused")])
    until((package.folder / "paused").exists, "a process that has written the index")
    other = package.start()
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(timeout=3)  # it would have ended long ago with the code that it found
    assert storing.communicate("")[0].strip() == "3"
    assert other.communicate()[0].strip() == "3"


ONLY_CACHED = """
from adder.adding import add; from adder.parts import {name}
from cdc.cached_njit import FunctionNotCached, only_cached
try:
    with only_cached():
        print(add({name}(1)))
except FunctionNotCached:
    print("not cached")
"""


def test_inside_only_cached_a_function_is_loaded_and_never_compiled(package: Package) -> None:
    package.upgrade(added=1)

    assert package.call(ONLY_CACHED) == "not cached"
    assert list(package.folder.rglob("*.nb?")) == []
    assert package.call() == "2"
    assert package.call(ONLY_CACHED) == "2"


def test_inside_only_cached_no_process_waits_for_another_that_compiles(package: Package) -> None:
    package.upgrade(added=1)
    compiling = package.start(PAUSE_BEFORE_CODE, [str(package.folder / "paused")])
    until((package.folder / "paused").exists, "a process that compiles")

    assert package.call(ONLY_CACHED) == "not cached"
    assert compiling.communicate("")[0].strip() == "2"
