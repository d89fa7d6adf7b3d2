"""Counts the threads of a process at the beginning of each fork: OpenBLAS ends its own ones while the fork runs."""

from __future__ import annotations

import os
from pathlib import Path

counted: list[list[str]] = []
"""The names of the threads at each fork."""


def count_before_forks() -> None:
    os.register_at_fork(before=lambda: counted.append(thread_names()))


def thread_names() -> list[str]:
    return [(task / "comm").read_text(encoding="utf-8").strip() for task in Path("/proc/self/task").iterdir()]
