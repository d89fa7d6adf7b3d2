"""cdc source: the event triggers are made and taken away, or their SQL is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run
from tests.fixtures.postgres import rows_of

TRIGGERS = "SELECT evtname FROM pg_event_trigger ORDER BY evtname"


def definition(folder: Path, dsn: str) -> Path:
    path = folder / "pipeline.yaml"
    path.write_text(
        f"version: 1\nname: shop\nsource: {{dsn: '{dsn}'}}\ntables: [{{match: 'public.*'}}]\n"
        f"log: {{path: '{folder}/log'}}\nsinks: []\n"
    )
    return path


def test_the_triggers_come_and_go(tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = definition(tmp_path, database)

    assert run(capsys, "source", "install", "-c", path, "--json").envelope["ok"]
    assert rows_of(database, TRIGGERS) == [("cdc_ddl_end",), ("cdc_drop",), ("cdc_rewrite",)]
    assert run(capsys, "source", "remove", "-c", path).status == 0
    assert rows_of(database, TRIGGERS) == []


def test_the_statements_are_printed_and_nothing_is_made(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = run(capsys, "source", "install", "-c", definition(tmp_path, database), "--print")

    assert "CREATE EVENT TRIGGER cdc_ddl_end" in outcome.output
    assert rows_of(database, TRIGGERS) == []
