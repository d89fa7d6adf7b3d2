"""A failure of any kind is an error with a code: cdc/failure_report.py."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from cdc.errors import CdcError, FileUnusable, SourceUnreachable
from cdc.failure_report import error_to_report


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
    assert error.message.startswith("unexpected KeyError at test_failure_report.py:")
    assert "value" not in error.message
    assert error.fix == "run it again with CDC_TRACEBACK=1 and report what it prints"
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
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "cdc", *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 3
    assert "CDC-5016" in done.stderr or "--json" in arguments
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


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
