"""Shipping: executors import what the driver sent them, not what happens to be installed beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cdc
import pipelines
from pipelines.runtime.ship_code import build_archive

FOLDERS = [Path(str(package.__file__)).parent for package in (cdc, pipelines)]
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[1])
import pipelines.source.read_tasks, pipelines.source.data_source, pipelines.folding.fold, cdc
print(cdc.__file__, pipelines.source.read_tasks.__file__)
"""


def test_python_imports_what_tasks_need_from_the_archive(tmp_path: Path) -> None:
    archive = build_archive(FOLDERS, tmp_path / "code.zip")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, archive], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert done.stdout.split() == [f"{archive}/cdc/__init__.py", f"{archive}/pipelines/source/read_tasks.py"], (
        done.stderr
    )


def test_the_same_files_make_the_same_archive(tmp_path: Path) -> None:
    first, second = (build_archive(FOLDERS[1:], tmp_path / name).read_bytes() for name in ("a.zip", "b.zip"))

    assert first == second
    assert b"__pycache__" not in first
