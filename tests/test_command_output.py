"""Output: lines for people and envelopes for programs."""

from __future__ import annotations

import errno
import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from cdc.command_output import (
    LineMark,
    aligned,
    counted,
    echo,
    echo_source,
    emit,
    error_to_report,
    fail,
    last_envelope,
    line,
)
from cdc.errors import CdcError, ConfigIssue, FileUnusable, InvalidDefinition, SourceUnreachable
from tests.fixtures import forked
from tests.fixtures.waiting import PATIENCE


class Terminal(io.StringIO):
    """A stream that says it is a terminal, in the encoding given."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__()
        self._encoding = encoding

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return True


def test_a_line_has_its_sign_and_the_next_step_under_it() -> None:
    stream = io.StringIO()
    line(LineMark.ADVICE, "careful", fix="do this", to=stream)
    assert stream.getvalue() == "⚠ careful\n  → do this\n"


def test_a_terminal_gets_colour_unless_it_says_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    stream = Terminal()
    line(LineMark.GOOD, "fine", to=stream)
    assert stream.getvalue() == "\x1b[32m✓\x1b[0m fine\n"
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    line(LineMark.GOOD, "fine", to=plain)
    assert plain.getvalue() == "✓ fine\n"


def test_a_terminal_without_the_signs_gets_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal("ascii")
    line(LineMark.BAD, "no", fix="yes", to=stream)
    assert stream.getvalue() == "x no\n  -> yes\n"


def test_control_characters_of_names_reach_no_terminal() -> None:
    stream = io.StringIO()
    line(LineMark.BAD, "table '\x1b[2J\r'", to=stream)
    assert stream.getvalue() == "✗ table '\\x1b[2J\\x0d'\n"


def test_an_envelope_is_one_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    emit("demo", json=True, summary="done", result={"tables": ["ü"]})
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert json.loads(printed) == {
        "command": "demo",
        "ok": True,
        "summary": "done",
        "result": {"tables": ["ü"]},
        "error": None,
    }


def test_the_last_envelope_is_found_between_other_lines(capsys: pytest.CaptureFixture[str]) -> None:
    emit("demo", json=True, summary="first")
    emit("demo", json=True, summary="done", result={"tables": ["ü"]})
    printed = capsys.readouterr().out

    assert last_envelope(f"a warning\n{printed}{{}}\n[1]\nthe end\n") == json.loads(printed.splitlines()[1])
    assert last_envelope("a warning\n[1]\n") is None


def test_an_error_is_said_with_its_code_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    fail("run", SourceUnreachable("connection refused", remedy="start it"), json=False)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "✗ CDC-2001 connection refused\n  → start it\n")


def test_every_issue_has_its_line_and_the_envelope_points_at_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    issues = tuple(ConfigIssue(path="a.yaml", line=n, column=3, key="k", message="bad") for n in (4, 7))
    fail("run", InvalidDefinition.from_issues(issues), json=False)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "✗ CDC-1002 a.yaml:4:3: k: bad",
        "✗ CDC-1002 a.yaml:7:3: k: bad",
    ]
    fail("run", InvalidDefinition.from_issues(issues), json=True)
    envelope = json.loads(capsys.readouterr().out)
    assert (envelope["error"]["path"], envelope["error"]["line"], envelope["error"]["column"]) == ("a.yaml", 4, 3)
    assert len(envelope["result"]["flaws"]) == 2


def test_columns_are_as_wide_as_their_widest_cell_and_names_cannot_move_the_cursor() -> None:
    rows = [("name", "size", "note"), ("a\x1b[2J", "1", ""), ("longer-name", "1,000", "x")]
    assert aligned(rows, right={1}) == [
        "name          size  note",
        "a\\x1b[2J         1",
        "longer-name  1,000  x",
    ]


HOSTILE = "a\x1b[2J\x9b31m\u202ecod.exe\u2066\x7f\udcff"


def test_a_count_agrees_with_its_noun() -> None:
    assert [counted(n, "index") for n in (0, 1, 2_000)] == ["0 indexes", "1 index", "2,000 indexes"]
    assert [counted(n, "issue") for n in (1, 2)] == ["1 issue", "2 issues"]


def test_names_are_escaped_wherever_a_command_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    echo("name:", HOSTILE)
    assert capsys.readouterr().out == "name: a\\x1b[2J\\x9b31m\\u202ecod.exe\\u2066\\x7f\\udcff\n"


def test_an_envelope_is_harmless_to_a_terminal_and_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    emit("demo", json=True, summary=HOSTILE)
    printed = capsys.readouterr().out
    assert not any(sign in printed for sign in "\x1b\x9b\u202e\u2066\x7f\udcff")
    assert json.loads(printed)["summary"] == HOSTILE


def test_what_a_program_is_to_read_is_escaped_on_a_terminal_alone() -> None:
    for stream, expected in ((Terminal(), "\\x1b[2J\n"), (io.StringIO(), "\x1b[2J\n")):
        with redirect_stdout(stream):
            echo_source("\x1b[2J")
        assert stream.getvalue() == expected


def test_an_error_with_a_code_stays_as_it_is() -> None:
    error = SourceUnreachable("no")
    assert error_to_report(error) is error


def test_a_file_that_cannot_be_used_is_named() -> None:
    error = error_to_report(PermissionError(errno.EACCES, "Permission denied", "/etc/shadow"))
    assert (type(error), error.message) == (FileUnusable, "cannot use '/etc/shadow': permission denied")


def raised() -> BaseException:
    try:
        return dict[str, BaseException]()["a row's value"]
    except KeyError as exc:
        return exc


def test_what_nobody_expected_has_its_type_and_place_and_no_value(capsys: pytest.CaptureFixture[str]) -> None:
    error = error_to_report(raised())
    assert type(error) is CdcError
    assert error.message.startswith("the command failed with an unexpected KeyError at test_command_output.py:")
    assert "value" not in error.message
    assert error.fix == "run the command again with CDC_TRACEBACK=1, and report the output"
    assert capsys.readouterr().err == ""


def test_the_traceback_is_printed_where_it_is_asked_for_and_in_the_log_of_a_process(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    error_to_report(raised(), logs=True)
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setenv("CDC_TRACEBACK", "1")
    error_to_report(raised())
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["version"], ["explain", "--json"], ["config", "schema"]])
def test_an_output_that_is_full_is_an_error_and_no_traceback(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full, TemporaryFile("w+", encoding="utf-8") as errors:
        status = forked.start("cdc", *arguments, output=full, errors=errors).wait(PATIENCE)
        errors.seek(0)
        said = errors.read()
    assert status == 3
    assert "CDC-5016" in said or "--json" in arguments
    assert "Traceback" not in said
    assert "Exception ignored" not in said


@pytest.mark.parametrize(
    ("name", "encoding", "printed"),
    [(b"\xff.yaml", "utf-8", rb"\udcff.yaml"), ("ü.yaml".encode(), "ascii", rb"\xfc.yaml")],
    ids=["of no encoding", "not of the terminal's"],
)
def test_a_name_that_cannot_be_printed_is_printed_as_an_escape(name: bytes, encoding: str, printed: bytes) -> None:
    environment = {**os.environ, "PYTHONUTF8": "1", "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "cdc", "validate", name], capture_output=True, check=False, env=environment
    )
    assert done.returncode == 2
    assert printed in done.stdout
    assert b"Traceback" not in done.stderr
