"""The application: its commands, its exit statuses, its envelope, and what it does not import."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command

from cdc.cli.app import COMMANDS, application
from cdc.errors import CdcError, all_error_classes
from tests.cli.command import run, spawn

HEAVY = ("pyspark", "psycopg", "sqlalchemy", "pyarrow", "rich", "alembic", "numba", "deltalake", "fastapi")
PROBE = f"""
import sys
from cdc.__main__ import main
status = main(sys.argv[1:])
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""
MODULES_PROBE = f"""
import sys
from cdc.__main__ import main
status = main(sys.argv[1:])
print(*(name for name in {sorted(COMMANDS)!r} if "cdc.cli." + name in sys.modules), file=sys.stderr)
sys.exit(status)
"""
READS_PROBE = """
import sys
from cdc.__main__ import main
read = []
sys.addaudithook(lambda event, given: read.append(given) if event == "open" and given[0] == sys.argv[-1] else None)
main(sys.argv[1:])
print(len(read), file=sys.stderr)
"""


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["explain", "CDC-2104"], ["validate", "config"]])
def test_light_commands_import_nothing_heavy(arguments: list[str]) -> None:
    assert _printed_by(PROBE, *arguments) == "[]"


@pytest.mark.parametrize(
    ("arguments", "imported"),
    [(["validate", "config"], "validate"), (["version"], ""), (["--help"], " ".join(sorted(COMMANDS)))],
)
def test_a_command_imports_no_module_of_another_command(arguments: list[str], imported: str) -> None:
    assert _printed_by(MODULES_PROBE, *arguments) == imported


@pytest.mark.parametrize("module", COMMANDS)
def test_the_table_of_commands_names_what_a_module_registers(module: str) -> None:
    for command in COMMANDS[module]:
        registered: Any = get_command(application(command))
        assert registered.commands.keys() == {*COMMANDS[module], "version", "explain"}


def test_a_valid_definition_is_read_once() -> None:
    assert _printed_by(READS_PROBE, "validate", "config/shop.yaml") == "1"


def _printed_by(probe: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", probe, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={"SHOP_DSN": "postgresql:///shop"},
    )
    assert done.returncode == 0
    return done.stderr.strip()


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


@pytest.mark.parametrize("error", all_error_classes(), ids=lambda error: error.code)
def test_every_code_is_explained(error: type[CdcError], capsys: pytest.CaptureFixture[str]) -> None:
    page = run(capsys, "explain", error.code.lower(), "--json").envelope["result"]
    assert page["code"] == error.code
    assert page["remedy"] == error.remedy
    assert page["meaning"]


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
