"""Timestamps that also record the machine's uptime, so that a clock change does not affect elapsed times."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Self

SECOND: Final = 1_000_000
"""Number of microseconds in a second."""
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
"""Path of the file in which Linux provides the id of the current boot. Each boot has a different id."""


@dataclass(frozen=True, slots=True)
class BootTimestamp:
    """A wall-clock time together with the uptime of the machine at that time."""

    clock_us: int
    """Wall-clock time in microseconds since 1970 UTC."""
    boot: str = ""
    """Id of the boot from which `up_us` counts; "" if the operating system has no such id."""
    up_us: int = 0
    """Microseconds from the boot to this time, including the time in suspend; 0 without a boot id."""

    @classmethod
    def now(cls) -> Self:
        """Return the current time of this machine."""
        boot, clock_us = _boot(), int(time.time() * SECOND)
        return cls(clock_us, boot, time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000) if boot else cls(clock_us)

    def since(self, earlier: BootTimestamp) -> int:
        """Return the microseconds from the earlier timestamp to this one.

        The result comes from the uptimes if both timestamps have the same boot id, and from the wall clock otherwise.
        """
        if self.boot and self.boot == earlier.boot:
            return self.up_us - earlier.up_us
        return self.clock_us - earlier.clock_us


@cache
def _boot() -> str:
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:  # no Linux
        return ""
