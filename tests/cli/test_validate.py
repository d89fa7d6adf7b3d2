"""cdc validate: all issues of all files, offline."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.__main__ import main as pipelines_main
from tests.cli.command import run
from tests.config.definitions import SOUND, changed, write

CANARY = "c4n4ryS3cret"


def test_a_sound_definition_is_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path)
    for named in ([path], ["-c", path]):
        outcome = run(capsys, "validate", *named)
        assert (outcome.status, outcome.output) == (0, "✓ 1 definition: valid\n")


def test_flaws_of_all_files_are_printed_with_their_places(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, changed("name: shop", "nam: shop"), "a.yaml")
    write(tmp_path, changed("path: log", "pathh: log"), "b.yml")
    write(tmp_path, "not yaml: [", "notes.txt")
    outcome = run(capsys, "validate", tmp_path)
    assert outcome.status == 2
    assert outcome.output.splitlines() == [
        f'✗ CDC-1002 {tmp_path}/a.yaml:1:1: nam: unknown key — did you mean "name"?',
        f'✗ CDC-1002 {tmp_path}/b.yml:7:3: log.pathh: unknown key — did you mean "path"?',
        "✗ 2 definitions: 2 issues",
        "  → correct the definition, then run 'cdc validate'",
    ]


def test_the_next_step_names_the_file_that_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, changed("name: shop", "nam: shop"))
    output = run(capsys, "validate", path).output
    assert output.endswith(f"  → correct the definition, then run 'cdc validate {path}'\n")


def test_a_definition_that_is_not_there_is_to_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.yaml"
    for command in (("validate",), ("status", "-c")):
        outcome = run(capsys, *command, missing)
        assert outcome.status == 2
        assert (outcome.output + outcome.errors).endswith("  → choose the definition file with -c FILE\n")
    # verify is a command of the child that it starts
    assert pipelines_main(["verify", "--against", "log", "-c", str(missing)]) == 2
    printed = capsys.readouterr()
    assert (printed.out + printed.err).endswith("  → choose the definition file with -c FILE\n")


def test_the_envelope_holds_every_issue_and_points_at_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, changed("name: shop", "nam: 1").replace("match", "mach"))
    outcome = run(capsys, "validate", path, "--json")
    assert outcome.status == 2
    assert outcome.envelope["command"] == "validate"
    assert [issue["line"] for issue in outcome.envelope["result"]["flaws"]] == [1, 5]
    error = outcome.envelope["error"]
    assert (error["code"], error["path"], error["line"], error["column"]) == ("CDC-1002", str(path), 1, 1)


def test_advice_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, "postgresql:///shop", "dsn").chmod(0o644)
    outcome = run(capsys, "validate", write(tmp_path, changed("postgresql://cdc@localhost/shop", "{file: dsn}")))
    assert outcome.status == 0
    assert outcome.output.startswith("⚠ CDC-1002 ")


COMMANDS = [
    (*command, *json)
    for command in [("validate",), ("config", "show"), ("config", "show", "--resolved")]
    for json in [(), ("--json",)]
]


def test_a_service_open_to_the_network_without_a_token_is_refused_with_an_example(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, SOUND + "service: {host: 0.0.0.0}\n")
    outcome = run(capsys, "validate", path)
    assert outcome.status == 2
    assert f"✗ CDC-5018 {path}:12:11: service.host: service.token is missing" in outcome.output
    for words in (["run"], ["run", "--only", "server"], ["server"]):
        started = run(capsys, *words, "-c", path)
        assert (started.status, "CDC-5018" in started.errors) == (2, True)
        assert "service: {token: {file: " in started.errors
    monkeypatch.setenv("TOKEN", "0123456789abcdef")
    write(tmp_path, SOUND + "service: {host: 0.0.0.0, token: '${TOKEN}'}\n")
    assert run(capsys, "validate", path).status == 0


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    "written", [f"postgresql://u:{CANARY}@h/d", "${CANARY_DSN}", "{env: CANARY_DSN}", f"[{CANARY}]"]
)
def test_no_secret_is_printed(
    written: str,
    command: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CANARY_DSN", f"postgresql://u:{CANARY}@h/d")
    path = write(tmp_path, changed("postgresql://cdc@localhost/shop", written))
    place = ["-c", path] if command[0] == "config" else [path]
    outcome = run(capsys, *command, *place)
    assert CANARY not in outcome.output + outcome.errors


def test_a_directory_without_definitions_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcome = run(capsys, "validate", tmp_path)
    assert outcome.status == 2
    assert "no definition file (*.yaml)" in outcome.errors
