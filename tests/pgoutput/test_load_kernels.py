"""After load_kernels no session compiles or loads a kernel."""

from __future__ import annotations

from pathlib import Path

from tests.fixtures import forked
from tests.fixtures.waiting import PATIENCE


def test_a_copy_and_a_stream_of_every_kind_of_message_compile_and_load_nothing(tmp_path: Path, database: str) -> None:
    """In a process of its own: in this one other tests have called the kernels."""
    done = forked.run("tests.pgoutput.compiled_session", database, tmp_path, timeout=PATIENCE)
    assert (done.output, done.status) == ("", 0), done.errors
