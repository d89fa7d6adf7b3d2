"""After load_kernels no session compiles or loads a kernel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.fixtures.waiting import PATIENCE


def test_a_copy_and_a_stream_of_every_kind_of_message_compile_and_load_nothing(tmp_path: Path, database: str) -> None:
    """In a process of its own: in this one other tests have called the kernels."""
    command = [sys.executable, "-m", "tests.pgoutput.compiled_session", database, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE)
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
