"""`cdc log export` writes what `cdc tail` prints, in several formats, and refuses what was trimmed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.cli.whole_log import whole_log_definition


@pytest.fixture(name="whole")
def _whole(tmp_path: Path) -> Path:
    return whole_log_definition(tmp_path)


def test_export_writes_what_tail_prints(capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    out = whole.parent / "out.jsonl"
    outcome = run(capsys, "log", "export", "--tables", "shop.*", out, "-c", whole, "--json")
    assert outcome.status == 0, outcome.errors
    lines = [json.loads(text) for text in out.read_text(encoding="utf-8").splitlines()]
    assert outcome.envelope["result"]["rows"] == len(lines)
    told = run(capsys, "tail", "shop.*", "--since", "0/74", "-n", "999", "-c", whole, "--json").envelope["result"]
    assert lines == told["changes"]
    assert run(capsys, "log", "export", out, "-c", whole).status == 2


@pytest.mark.parametrize("shape", ["debezium", "flat", "parquet"])
def test_export_has_a_shape_for_each_reader(capsys: pytest.CaptureFixture[str], whole: Path, shape: str) -> None:
    out = whole.parent / "out"
    outcome = run(capsys, "log", "export", "--format", shape, "--from", "0/78", "--to", "0/8C", out, "-c", whole)
    assert outcome.status == 0, outcome.errors
    assert out.is_dir() == (shape == "parquet")


def test_export_from_what_was_trimmed_says_where_it_may_begin(capsys: pytest.CaptureFixture[str], whole: Path) -> None:
    outcome = run(capsys, "log", "export", "--from", "0/64", whole.parent / "out", "-c", whole)
    assert outcome.status == 1
    assert "--from 0/74" in outcome.errors
    assert not (whole.parent / "out").exists()
