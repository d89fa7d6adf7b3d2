"""cdc doctor: what is wrong with the source, said for people, for programs and for psql."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.command import run
from tests.config.definitions import SOUND, write
from tests.fixtures.postgres import run_sql

CANARY = "c4n4ryS3cret"


def test_an_unreachable_source_is_status_3_and_its_password_unsaid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_DSN", f"postgresql://u:{CANARY}@127.0.0.1:1/d?connect_timeout=2")
    path = write(tmp_path, SOUND.replace("postgresql://cdc@localhost/shop", "${THE_DSN}"))
    outcome = run(capsys, "doctor", "-c", path, "--json")
    assert outcome.status == 3
    assert outcome.envelope["ok"] is False
    assert outcome.envelope["error"]["code"].startswith("CDC-2")
    assert CANARY not in outcome.output + outcome.errors


def definition(directory: Path, dsn: str, tables: str) -> Path:
    text = SOUND.replace("postgresql://cdc@localhost/shop", dsn).replace("shop.*", tables)
    return write(directory, text)


def test_a_table_that_is_not_there_is_found(database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = definition(tmp_path, database, "nothing.here")
    outcome = run(capsys, "doctor", "-c", path, "--json")
    problems = outcome.envelope["result"]["problems"]
    assert problems
    assert outcome.status == (3 if any(problem["fatal"] for problem in problems) else 0)
    assert outcome.envelope["ok"] is (outcome.status == 0)
    lines = run(capsys, "doctor", "-c", path).output.splitlines()
    assert [line[0] for line in lines if line[0] in "✗⚠"] == ["✗" if problem["fatal"] else "⚠" for problem in problems]


def test_statements_alone_can_be_given_to_psql(
    database: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(database, "CREATE SCHEMA shop", "CREATE TABLE shop.keyless (a int)")
    path = definition(tmp_path, database, "shop.*")
    problems = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["problems"]
    printed = run(capsys, "doctor", "-c", path, "--sql").output
    mended = [problem for problem in problems if problem["sql"]]
    assert printed.count("-- CDC-") == len(mended)
    assert mended
