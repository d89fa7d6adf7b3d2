"""Whatever is typed and whatever is broken: no traceback, a status that is documented, one envelope with --json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import forked


def broken(folder: Path, seed: str, count: int, *more: str) -> list[dict[str, Any]]:
    """What so many commands broke; the process that ran them ended well."""
    done = forked.run("tests.cli.fuzzing", folder, seed, count, *more, timeout=3600.0)
    assert done.status == 0, done.errors[-3000:]
    *found, last = map(json.loads, (folder / "found.jsonl").read_text(encoding="utf-8").splitlines())
    assert last == {"ran": count}
    return found


def test_no_command_over_a_broken_pipeline_ends_in_a_traceback(tmp_path: Path) -> None:
    assert broken(tmp_path, "short", 10) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2))
def test_two_thousand_commands_end_in_no_traceback(tmp_path: Path, seed: int) -> None:
    assert broken(tmp_path, str(seed), 2000) == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_commands_over_a_live_source_end_in_no_traceback(tmp_path: Path, database: str) -> None:
    assert broken(tmp_path, "live", 1000, database) == []
