"""Timestamps with the time since boot, so that setting the clock does not change an elapsed time."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

SECOND: Final = 1_000_000
"""Microseconds."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""File on Linux with an id that changes at each boot."""


@dataclass(frozen=True, slots=True)
class BootTimestamp:
    """A wall-clock time together with the time since boot."""

    clock_us: int
    """Microseconds UTC."""
    boot: str = ""
    """Boot id that `up_us` belongs to; "" where the system has none."""
    up_us: int = 0
    """Microseconds since boot, including suspend."""

    @classmethod
    def now(cls) -> Self:
        """The current time of this machine."""
        boot, clock_us = _boot(), int(time.time() * SECOND)
        return cls(clock_us, boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000) if boot else cls(clock_us)

    def since(self, earlier: BootTimestamp) -> int:
        """Microseconds since an earlier timestamp; by wall clock if the boot ids differ."""
        if self.boot and self.boot == earlier.boot:
            return self.up_us - earlier.up_us
        return self.clock_us - earlier.clock_us


@cache
def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        return ""
