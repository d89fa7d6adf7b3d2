"""The budget of continuous verification: how long it rests after it has read rows."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field


def used_cpu() -> float:
    """Return the seconds of processor time that this process and its ended children have used."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@dataclass(slots=True)
class ReadBudget:
    """Limits rows per second and processor time, on average. Rests are between two cuts, when nothing is locked.

    A fast comparison and a long rest are better than a slow comparison: during the comparison, tables are locked
    against changes of their definition, and the source keeps dead rows. The processor time before the first cut, which
    imports modules, does not count.
    """

    rows_per_second: float | None = None
    """Maximum rows of the source per second; None for no limit."""
    cpu: float | None = None
    """Maximum share of one core that this process uses, and that its queries use at the source; None for no limit."""
    clock: Callable[[], float] = time.monotonic
    cpu_clock: Callable[[], float] = used_cpu
    _cpu_before: float = field(init=False)
    _free_at: float = field(init=False)
    """Time at which everything that was spent is within the budget."""

    def __post_init__(self) -> None:
        self._cpu_before = self.cpu_clock()
        self._free_at = self.clock()

    def rest_after(self, rows: int, seconds: float) -> float:
        """Return the seconds to rest after a cut at which rows were read in some seconds.

        The source spends at most these seconds of processor time, because one session runs on one core.
        """
        now, cpu = self.clock(), self.cpu_clock()
        costs = [0.0]
        if self.rows_per_second is not None:
            costs.append(rows / self.rows_per_second)
        if self.cpu is not None:
            costs.append(max(cpu - self._cpu_before, seconds) / self.cpu)
        self._cpu_before = cpu
        self._free_at = max(self._free_at, now - seconds) + max(costs)
        return max(0.0, self._free_at - now)
