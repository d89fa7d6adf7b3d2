"""Noted: when something was noted, so that a clock that is set meanwhile does not end the time that it has."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

SECOND: Final = 1_000_000
"""Microseconds."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""On Linux, another one each time the machine starts."""


@dataclass(frozen=True, slots=True)
class BootTimestamp:
    """A time by the clock, and by what no hand can set."""

    clock_us: int
    """Microseconds UTC."""
    boot: str = ""
    """Which life of which machine `up_us` is of; "" where there is none to be told."""
    up_us: int = 0
    """Microseconds since that life began, asleep or awake."""

    @classmethod
    def now(cls) -> Self:
        """Of this machine."""
        boot, clock_us = _boot(), int(time.time() * SECOND)
        return cls(clock_us, boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000) if boot else cls(clock_us)

    def since(self, earlier: BootTimestamp) -> int:
        """Microseconds from an earlier moment to this one: of two lives or machines only their clocks tell."""
        if self.boot and self.boot == earlier.boot:
            return self.up_us - earlier.up_us
        return self.clock_us - earlier.clock_us


@cache
def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        return ""
