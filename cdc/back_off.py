"""Exponential back-off: the pauses between the attempts of all retry loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, wait_exponential


@dataclass(frozen=True, slots=True)
class BackOff:
    """Seconds between attempts: the first pause, doubled after each failure up to the longest."""

    first: float
    longest: float
    jitter: float = 0.0
    """Greatest random addition, so that processes that failed together do not try again together."""

    def seconds(self, failures: int) -> float:
        """The pause after this many failures in a row, from 1; jitter does not make it longer than the longest."""
        attempts = RetryCallState(Retrying(), None, (), {})
        attempts.attempt_number = max(1, failures)
        pause = wait_exponential(multiplier=self.first, max=self.longest)(attempts)
        return min(self.longest, pause + random.uniform(0, self.jitter))  # noqa: S311 - spreads attempts, guards nothing
