"""Problem: a condition that needs an operator, as commands, page and API show it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from cdc.errors import all_error_classes

REMEDIES: Final[Mapping[str, str]] = {error.code: error.remedy for error in all_error_classes()}
"""Default remedy of each error class, by error code."""
_REASON: Final = re.compile(r"(CDC-\d{4}) (.*?)(?: → (.*))?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem of a pipeline, with the next step of an operator."""

    subject: str
    code: str | None
    message: str
    remedy: str


def problem_from_reason(subject: str, reason: str, otherwise: str) -> Problem:
    """Return a problem with this subject from a reported reason: `CDC-3001 message → remedy`, or free text.

    `otherwise` is the remedy if the reason contains neither a remedy nor a known error code.
    """
    match = _REASON.fullmatch(reason)
    if match is None:
        return Problem(subject, None, reason, otherwise)
    code, message, remedy = match.groups()
    return Problem(subject, code, message, remedy or REMEDIES.get(code, otherwise))
