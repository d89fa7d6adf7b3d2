"""Kernels of COPY on small texts; `test_copy_decoder.py` decodes whole lines."""

from __future__ import annotations

import numpy as np
import pytest

from cdc.pgoutput import copy_kernel


@pytest.mark.parametrize(("text", "lines"), [(b"", 0), (b"a", 0), (b"a\n", 1), (b"a\n\nb", 2)])
def test_only_complete_lines_are_counted(text: bytes, lines: int) -> None:
    assert copy_kernel.lines_in(np.frombuffer(text, np.uint8)) == lines
