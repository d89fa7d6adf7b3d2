"""Settings: what the command line asks of the demo."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cdc.demo.pipeline_probe import LAKE, SEARCH


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the command line asks for."""

    folder: Path
    seconds: float | None = None
    """Of workload; None until stopped."""
    rate: float = 200.0
    """Changes per second."""
    keep: bool = False
    version: int = 18
    """Major version of Postgres: 16 or 18."""
    spark: bool = True
    port: int = 8083
    """Of the page; the next free one if taken."""
    jars: tuple[str, ...] = ()

    @property
    def sinks(self) -> tuple[str, ...]:
        """The sinks that will have something to show."""
        return (LAKE, SEARCH) if self.spark else ()
