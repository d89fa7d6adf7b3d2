"""`cdc replay`: its options are passed unchanged to a child process, whose exit status it returns."""

from __future__ import annotations

import pytest

from tests.fixtures import forked

CHILD = """
import sys
sys.executable = {program!r}
from cdc.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def replay(program: str, *arguments: str) -> forked.Ended:
    """Run `cdc replay` with a program in the place of the child's Python."""
    return forked.run("tests.run_code", CHILD.format(program=program), "replay", *arguments)


def test_options_are_passed_on() -> None:
    given = ("lake", "-c", "shop.yaml", "--tables", "a.*", "--tables", "b.*", "--into", "/new", "--to", "0/10")
    assert replay("echo", *given, "--dry-run", "--json").output == (
        "-m pipelines replay -c shop.yaml --from=beginning --to=0/10 --tables=a.* --tables=b.* --into=/new --dry-run "
        "--json -- lake\n"
    )


@pytest.mark.parametrize(("program", "status"), [("true", 0), ("false", 1)])
def test_the_exit_status_is_that_of_the_child(program: str, status: int) -> None:
    assert replay(program, "lake").status == status
