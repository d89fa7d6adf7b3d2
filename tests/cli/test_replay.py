"""`cdc replay`: its options are passed unchanged to a child process, whose exit status it returns."""

from __future__ import annotations

import subprocess
import sys

import pytest

CHILD = """
import sys
sys.executable = {program!r}
from cdc.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def replay(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `cdc replay` with a program in the place of the child's Python."""
    command = [sys.executable, "-c", CHILD.format(program=program), "replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_options_are_passed_on() -> None:
    given = ("lake", "-c", "shop.yaml", "--tables", "a.*", "--tables", "b.*", "--into", "/new", "--to", "0/10")
    assert replay("echo", *given, "--dry-run", "--json").stdout == (
        "-m pipelines replay -c shop.yaml --from=beginning --to=0/10 --tables=a.* --tables=b.* --into=/new --dry-run "
        "--json -- lake\n"
    )


@pytest.mark.parametrize(("program", "status"), [("true", 0), ("false", 1)])
def test_the_exit_status_is_that_of_the_child(program: str, status: int) -> None:
    assert replay(program, "lake").returncode == status
