"""Exponential back-off: the pauses between the attempts of all retry loops."""

from __future__ import annotations

import random
from dataclasses import dataclass

from tenacity import RetryCallState, Retrying, wait_exponential


@dataclass(frozen=True, slots=True)
class BackOff:
    """Pauses between attempts, in seconds: each failure doubles the pause, from `first` up to `longest`."""

    first: float
    longest: float
    jitter: float = 0.0
    """Maximum number of random seconds added to a pause, so that processes do not all retry at the same time."""

    def seconds(self, failures: int) -> float:
        """Return the pause in seconds after this number of consecutive failures (at least 1).

        Random jitter never makes the pause longer than `longest`.
        """
        attempts = RetryCallState(Retrying(), None, (), {})
        attempts.attempt_number = max(1, failures)
        pause = wait_exponential(multiplier=self.first, max=self.longest)(attempts)
        return min(self.longest, pause + random.uniform(0, self.jitter))  # noqa: S311 - spreads attempts, guards nothing
