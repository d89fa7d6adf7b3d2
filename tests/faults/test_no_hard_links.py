"""A file system without hard links is refused by its code before anything is committed there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.faults.forked_strace import traced
from tests.fixtures.waiting import PATIENCE

LIFE = """
import sys
from pathlib import Path
from cdc import atomic_file
from cdc.errors import CdcError
from cdc.delta_protocol.table_storage import storage_of
from tests.pipelines.cold_log import log_writer

root = Path(sys.argv[1])
for attempt in (
    lambda: atomic_file.create(root / "file", b"content"),
    lambda: atomic_file.probe_links(root / "later" / "made"),
    lambda: log_writer(root / "log"),
    lambda: storage_of(str(root)).create("commit", b"of a target"),
    lambda: storage_of(str(root)).create_durably("commit", b"of a target or its published record"),
):
    try:
        attempt()
        print("done", flush=True)
    except CdcError as exc:
        print(exc.code, exc.message, flush=True)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("error", ["EPERM", "EOPNOTSUPP"])
def test_log_and_lake_are_not_begun_where_a_commit_could_replace_another_one(tmp_path: Path, error: str) -> None:
    root, said = tmp_path / "root", tmp_path / "said"
    root.mkdir()
    options = ["-e", "trace=link,linkat", "-e", f"inject=link,linkat:error={error}"]
    with (
        said.open("wb") as output,
        traced(options, tmp_path / "trace", "tests.run_code", LIFE, root, output=output) as process,
    ):
        assert process.wait(PATIENCE) == 0, said.read_text()
    lines = said.read_text().splitlines()
    assert len(lines) == 5, lines
    assert all(line.startswith("CDC-5020 the file system of ") for line in lines), lines
    assert [path for path in root.rglob("*") if path.is_file()] == []
