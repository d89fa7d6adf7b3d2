"""Settings of the demo, from the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cdc.demo.pipeline_probe import LAKE, SEARCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of one demo."""

    folder: Path
    seconds: float | None = None
    """Seconds of workload; None to run until stopped."""
    rate: float = 200.0
    """Changes per second."""
    keep: bool = False
    version: int = 18
    """Major version of Postgres: 16 or 18."""
    spark: bool = True
    port: int = 8083
    """Port of the page, or the next free one."""
    jars: tuple[str, ...] = ()

    @property
    def sinks(self) -> tuple[str, ...]:
        """Names of the sinks that get rows."""
        return (LAKE, SEARCH) if self.spark else ()
