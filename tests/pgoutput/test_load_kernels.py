"""After load_kernels no session compiles or loads a kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.fixtures import forked
from tests.fixtures.waiting import PATIENCE


def test_a_copy_and_a_stream_of_every_kind_of_message_compile_and_load_nothing(tmp_path: Path, database: str) -> None:
    """In a process of its own: in this one other tests have called the kernels."""
    done = forked.run("tests.pgoutput.compiled_session", database, tmp_path, timeout=PATIENCE)
    assert (done.output, done.status) == ("", 0), done.errors


def test_kernels_that_are_not_cached_are_not_compiled_by_the_function_that_only_loads(tmp_path: Path) -> None:
    cache = {"NUMBA_CACHE_DIR": str(tmp_path)}
    code = "from cdc.pgoutput.load_kernels import load_cached_kernels; load_cached_kernels()"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | cache, check=False)

    assert done.returncode == 0
    assert list(tmp_path.rglob("*.nbc")) == []
