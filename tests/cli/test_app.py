"""The application: its commands, its exit statuses, its envelope, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from cdc.cli.app import COMMANDS, application
from cdc.errors import all_error_classes
from tests.cli.command import run, spawn

HEAVY = ("pyspark", "psycopg", "sqlalchemy", "pyarrow", "rich", "alembic", "numba", "deltalake", "fastapi")
STEPS: list[tuple[list[str], str]] = [
    (["version"], ""),
    (["explain", "CDC-2104"], ""),
    (["validate", "config"], "validate"),
    (["validate", "config/shop.yaml"], "validate"),
    (["--help"], " ".join(sorted(COMMANDS))),
]
"""Commands that one process runs one after the other, and the modules of commands that it has imported behind each."""
PROBE = f"""
import json, sys
from cdc.__main__ import main
opened, found = [], []
sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" else None)
for arguments, _ in {STEPS!r}:
    opened.clear()
    status = main(arguments)
    reads = opened.count(arguments[-1])
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    modules = " ".join(name for name in {sorted(COMMANDS)!r} if "cdc.cli." + name in sys.modules)
    found.append([status, reads, heavy, modules])
print(json.dumps(found), file=sys.stderr)
"""


def test_a_light_command_imports_nothing_heavy_and_no_module_of_another_and_reads_a_definition_once() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        capture_output=True,
        text=True,
        check=False,
        env={"SHOP_DSN": "postgresql:///shop"},
    )
    assert done.returncode == 0
    found = {tuple(given): one for (given, _), one in zip(STEPS, json.loads(done.stderr), strict=True)}
    assert {given: (status, heavy) for given, (status, _, heavy, _) in found.items()} == dict.fromkeys(found, (0, []))
    assert [modules for *_, modules in found.values()] == [imported for _, imported in STEPS]
    assert found["validate", "config/shop.yaml"][1] == 1


def test_the_table_of_commands_names_what_a_module_registers() -> None:
    for module, commands in COMMANDS.items():
        for command in commands:
            registered: Any = get_command(application(command))
            assert registered.commands.keys() == {*commands, "version", "explain"}, module


def test_without_arguments_the_help_is_shown_and_the_usage_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys)
    assert outcome.status == 2
    assert "Usage: cdc" in outcome.output + outcome.errors


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "--help")
    assert outcome.status == 0
    for command in ("validate", "doctor", "migrate", "config", "version", "explain"):
        assert f"\n  {command} " in outcome.output


@pytest.mark.parametrize("arguments", [["bogus"], ["validate", "--bogus"], ["migrate", "upp"], ["migrate", "up", "x"]])
def test_wrong_usage_is_status_2_with_a_next_step(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, *arguments)
    assert outcome.status == 2
    assert outcome.errors.startswith("✗ CDC-1000 ")
    assert "→ run 'cdc " in outcome.errors
    envelope = run(capsys, *arguments, "--json").envelope
    assert envelope["ok"] is False
    assert envelope["error"]["code"] == "CDC-1000"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "version", "--json")
    assert outcome.status == 0
    assert run(capsys, "--version").output == f"cdc {outcome.envelope['result']['version']}\n"


def test_every_code_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    for error in all_error_classes():
        page = run(capsys, "explain", error.code.lower(), "--json").envelope["result"]
        assert (page["code"], page["remedy"], bool(page["meaning"])) == (error.code, error.remedy, True)


def test_all_codes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    listed = run(capsys, "explain").output
    assert all(error.code in listed for error in all_error_classes())


def test_an_unknown_code_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "explain", "CDC-9999")
    assert outcome.status == 2
    assert "→ run 'cdc explain' to list all codes" in outcome.errors


def test_a_pipe_that_closes_early_prints_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "cdc", "config", "schema"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert b"Traceback" not in process.stderr.read()


def test_as_a_process_it_exits_with_the_same_status() -> None:
    assert spawn("version").status == 0
    assert spawn("explain", "CDC-9999").status == 2
