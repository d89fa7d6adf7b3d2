"""`cdc verify`: what is asked goes to a child, with the signals that end it, and its exit status comes back."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures.forked import run, start
from tests.fixtures.waiting import PATIENCE, until


def definition(folder: Path) -> Path:
    """A pipeline that never ran."""
    path = folder / "pipeline.yaml"
    path.write_text(
        "version: 1\nname: never\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/gone'}\n"
        f"tables: [{{match: 'public.*'}}]\nlog: {{path: '{folder}/log'}}\n"
        f"sinks: [{{name: find, type: search, path: '{folder}/find'}}]\n"
        f"catalog: {{url: 'sqlite:///{folder}/catalog.db'}}\n"
    )
    return path


def test_what_cannot_be_is_a_usage_error(tmp_path: Path) -> None:
    path = definition(tmp_path)
    refused = run("cdc", "verify", "--mode", "guess", "-c", path, timeout=PATIENCE)
    assert refused.status == 2
    assert refused.errors == (
        "✗ CDC-1000 invalid value for '--mode': 'guess' is not one of 'rows', 'checksum', 'count'\n"
        "  → run 'cdc verify --help'\n"
    )


def test_a_continuous_one_waits_for_what_is_not_there_yet_and_ends_at_sigterm(tmp_path: Path) -> None:
    said = tmp_path / "said"
    with said.open("wb") as output:
        child = start("cdc", "verify", "--every", "1h", "-c", definition(tmp_path), output=output)
    until(lambda: "no change log at" in said.read_text(), said.read_text)
    child.terminate()
    assert child.wait(PATIENCE) == 0
