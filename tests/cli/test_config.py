"""cdc config: a definition as it is understood, and the form of all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.config.definitions import SOUND, changed, write


def test_a_definition_is_shown_as_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "config", "show", "-c", write(tmp_path))
    assert outcome.status == 0
    assert "name: shop\n" in outcome.output
    assert "heartbeat" not in outcome.output


def test_the_resolved_view_has_defaults_and_references(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_DSN", "postgresql://u:hidden@h/d")
    path = write(tmp_path, changed("postgresql://cdc@localhost/shop", "${THE_DSN}"))
    outcome = run(capsys, "config", "show", "--resolved", "-c", path, "--json")
    source = outcome.envelope["result"]["source"]
    expected = {
        "dsn": "${THE_DSN}",
        "slot": {"name": "cdc_shop", "create": True, "failover": False},
        "publication": {"name": "cdc_shop_pub", "create": True, "manage": "auto"},
        "heartbeat": "10s",
        "on_wal_budget": "warn",
    }
    assert {key: source[key] for key in expected} == expected
    assert "hidden" not in outcome.output


def test_a_broken_definition_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, SOUND + "sinkss: []\n")
    outcome = run(capsys, "config", "show", "-c", path)
    assert (outcome.status, outcome.output) == (2, "")
    assert f'{path}:12:1: sinkss: unknown key — did you mean "sinks"?' in outcome.errors


def test_the_schema_is_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "config", "schema").output
    assert json.loads(printed)["title"] == "Definition"
    target = tmp_path / "cdc.schema.json"
    assert run(capsys, "config", "schema", "-o", target).status == 0
    assert target.read_text(encoding="utf-8") == printed
    assert run(capsys, "config", "schema", "-o", tmp_path).status == 2
