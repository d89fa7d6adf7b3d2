"""Landlock: a process that denied itself file writes, and the processes that it starts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdc.stores.landlock import kernel_version

WRITES = """
import os, subprocess, sys
from cdc.stores.landlock import deny_file_writes

folder = sys.argv[1]
with open(f"{folder}/opened", "w") as opened:
    assert deny_file_writes()
    opened.write("written")
open(os.devnull, "w").write("x")
print(open(f"{folder}/kept").read())


def refused(act, *arguments):
    try:
        act(*arguments)
    except PermissionError:
        return True
    return False


print([
    refused(open, f"{folder}/new", "w"),
    refused(open, f"{folder}/kept", "a"),
    refused(os.unlink, f"{folder}/kept"),
    refused(os.mkdir, f"{folder}/directory"),
    refused(os.rename, f"{folder}/kept", f"{folder}/moved"),
    subprocess.run(["/bin/sh", "-c", f"echo x > {folder}/child"], stderr=subprocess.DEVNULL).returncode != 0,
])
"""


@pytest.mark.skipif(kernel_version() == 0, reason="the kernel has no Landlock")
def test_only_open_files_and_the_null_device_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine", encoding="utf-8")
    command = [sys.executable, "-c", WRITES, str(tmp_path)]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parents[2])

    assert ended.stdout.splitlines() == ["mine", str([True] * 6)], ended.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "opened"]
    assert (tmp_path / "opened").read_text(encoding="utf-8") == "written"
