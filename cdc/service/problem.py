"""Problem: something that a person must look at, as status, page and API tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the next step."""

    subject: str
    code: str | None
    message: str
    remedy: str
