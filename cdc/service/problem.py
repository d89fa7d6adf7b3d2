"""Problem: something that needs an operator, as status, page and API show it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the next step."""

    subject: str
    code: str | None
    message: str
    remedy: str
