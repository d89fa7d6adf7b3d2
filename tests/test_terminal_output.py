"""Output: lines for people and envelopes for programs."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stdout

import pytest

from cdc.errors import ConfigIssue, InvalidDefinition, SourceUnreachable
from cdc.terminal_output import LineMark, aligned, echo, echo_source, emit, fail, line


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


def test_an_error_is_said_with_its_code_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    fail("run", SourceUnreachable("connection refused", remedy="start it"), json=False)
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", "✗ CDC-2001 connection refused\n  → start it\n")


def test_every_flaw_has_its_line_and_the_envelope_points_at_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    flaws = tuple(ConfigIssue(path="a.yaml", line=n, column=3, key="k", message="bad") for n in (4, 7))
    fail("run", InvalidDefinition.from_issues(flaws), json=False)
    assert capsys.readouterr().err.splitlines()[:2] == [
        "✗ CDC-1002 a.yaml:4:3: k: bad",
        "✗ CDC-1002 a.yaml:7:3: k: bad",
    ]
    fail("run", InvalidDefinition.from_issues(flaws), json=True)
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
