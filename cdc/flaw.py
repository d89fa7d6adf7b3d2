"""Flaw: one thing wrong in a definition."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """One thing wrong in a definition, and where it stands; never the value that stands there."""

    path: str
    line: int
    """1-based; 1 when the file as a whole is meant."""
    column: int
    """1-based, in characters."""
    key: str
    """Dotted, list places as numbers: `sinks.0.path`; empty for the file as a whole."""
    message: str
    suggestion: str | None = None
    """What was probably meant."""
    code: str = "CDC-1002"
    fix: str | None = None
    """What to do, where it is more than to correct what is said there."""
    fatal: bool = True
    """False for advice, which stops nothing."""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        meant = f' — did you mean "{self.suggestion}"?' if self.suggestion else ""
        return f"{self.path}:{self.line}:{self.column}: {key}{self.message}{meant}"
