"""Kernels on single values, and without a directory for compiled code."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cdc
from cdc.pgoutput import kernel


def as_array(value: bytes) -> np.ndarray:
    """The bytes in the read-only form that the kernels are compiled for."""
    return np.frombuffer(value, np.uint8)


@given(st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode)), st.sampled_from([b"", b"\xff" * 9]))
@example(b"\xed\xa0\x80", b"")
@example(b"\xc0\x80", b"")
@example(b"\xf4\x90\x80\x80", b"")
@example(b"\xe2\x82", b"\x82")
@example(b"12345678\xff", b"\xff")
def test_the_kernel_accepts_the_utf8_that_python_accepts(value: bytes, around: bytes) -> None:
    try:
        value.decode()
        valid = True
    except UnicodeDecodeError:
        valid = False

    buffer = as_array(around + value + around)
    assert kernel.is_utf8(buffer, len(around), len(around) + len(value)) == valid


@pytest.mark.parametrize("room", [0, 3, 8, 20])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 16, 31])
def test_bytes_are_copied_with_and_without_room_for_a_whole_word(size: int, room: int) -> None:
    source, target = as_array(bytes(range(5, 5 + size + room))), np.zeros(2 + size + room, np.uint8)

    kernel.copy_bytes(source, 0, size, target, 2)

    assert bytes(target[2 : 2 + size]) == bytes(range(5, 5 + size))
    assert not target[:2].any()
    assert not target[2 + size + 7 :].any()


def test_the_kernels_run_without_a_writable_cache_directory(tmp_path: Path):
    package = Path(cdc.__file__).parent
    copy = tmp_path / "cdc"
    shutil.copytree(package, copy, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "pgoutput" / "__pycache__").write_text("not a directory")
    not_a_directory = str(tmp_path / "cdc" / "errors.py")
    script = (
        "import numpy as np\nfrom cdc.pgoutput import kernel\n"
        f"assert kernel.__file__.startswith({str(tmp_path)!r})\n"
        "buffer = np.array([97, 255], np.uint8)\nprint(kernel.is_utf8(buffer, 0, 1), kernel.is_utf8(buffer, 0, 2))"
    )
    environment = {
        "HOME": not_a_directory,
        "XDG_CACHE_HOME": not_a_directory,
        "NUMBA_CACHE_DIR": not_a_directory,
        "PYTHONPATH": str(tmp_path),
    }
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("True False", 0), done.stderr
