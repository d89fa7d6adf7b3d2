"""The entry point: arguments become an exit status, a failure becomes a message with a remedy that can be copied."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdc.__main__ import main


@pytest.mark.parametrize("option", [["-c", "my shop.yaml"], ["--config=my shop.yaml"]])
def test_a_remedy_contains_the_definition_of_the_command_line(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my shop.yaml").write_text("name: shop\n", encoding="utf-8")
    assert main(["status", *option]) == 2
    assert "'cdc validate \"my shop.yaml\"'" in capsys.readouterr().err


def test_a_usage_error_names_the_help_of_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", "up", "--bogus"]) == 2
    assert "run 'cdc migrate up --help'" in capsys.readouterr().err


def test_with_json_an_error_is_an_envelope_on_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "CDC-9999", "--json"]) == 2
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["command"], envelope["ok"], envelope["error"]["code"]) == ("explain", False, "CDC-1000")
