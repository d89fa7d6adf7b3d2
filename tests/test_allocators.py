"""Memory of a long-running process; allocators in a process of its own, because they cannot be set back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from cdc.allocators import usable_memory

LARGE = """
import numpy as np
import pyarrow as pa
from cdc.allocators import use_system_allocators

use_system_allocators(client_threads=True)

def resident() -> int:
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

before = resident()
block = pa.allocate_buffer(64 << 20)
np.frombuffer(block, dtype=np.uint8)[:] = 1
assert resident() - before > 60 << 10
del block
assert resident() - before < 8 << 10
assert pa.default_memory_pool().backend_name == "system"
"""


def test_a_large_block_returns_to_the_system_when_it_is_freed() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_container_may_use_its_limit_and_otherwise_the_machine_counts(tmp_path: Path) -> None:
    group, machine = tmp_path / "memory.max", usable_memory(tmp_path / "missing")
    assert machine > 64 << 20
    for text, usable in (("67108864\n", 64 << 20), ("max\n", machine), (f"{machine * 2}\n", machine)):
        group.write_text(text)
        assert usable_memory(group) == usable
