"""The continuous verification by a definition's key `verify`, in a child process of the server process.

The process verifies what is due within the budget, and exits when nothing is due for a while, so that it needs neither
memory nor processor between two passes. The catalog records the progress, so the interval survives restarts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

from cdc.catalog import Catalog
from cdc.catalog.verification_state import NEXT_AT
from cdc.command_output import emit
from cdc.config import Definition
from cdc.config.views import NAME_OF_VIEWS
from cdc.errors import ExitCode
from cdc.log.reader import LogReader, log_exists
from cdc.position import Position
from pipelines.verification.continuous import ContinuousVerification, RangeResult, VerificationSchedule
from pipelines.verification.read_budget import ReadBudget
from pipelines.verification.verify import VerifyOptions, compare_views, whole_range

CUT_SECONDS: Final = 2.0
"""Seconds after which a cut is released: while it exists, the source keeps dead rows, and apply keeps old files."""
IDLE_SECONDS: Final = 900.0
"""The process exits if nothing is due for so long; a start costs two to three seconds of processor time."""
RETRY_SECONDS: Final = 60.0
"""Maximum seconds from a failed round to the next attempt."""
MAX_LAG_SECONDS: Final = 30.0
"""A sink that is further behind is not verified now: it would need long to reach a cut."""
NICE: Final = 10
"""Amount by which the nice value of the process is increased."""
Report = Callable[[RangeResult], None]


def run(definition: Definition, report: Report) -> int:
    """Verify what is due until nothing is due for IDLE_SECONDS, or until SIGTERM; return the exit status.

    report: is called with the result of each range of keys. The last envelope contains the time at which something is
    due again.
    """
    os.nice(NICE)
    with Catalog.open(definition.catalog.url) as catalog:
        catalog.verified.retain_sinks(definition.name, [NAME_OF_VIEWS, *(sink.name for sink in definition.sinks)])
    schedule = VerificationSchedule(
        every=definition.verify.every,
        cut_seconds=CUT_SECONDS,
        budget=ReadBudget(definition.verify.rows_per_second, definition.verify.max_cpu),
        ends_before=IDLE_SECONDS,
        one_sink_per_cut=True,
        max_lag=MAX_LAG_SECONDS,
        after_round=_ViewComparison(definition, report).compare_due if definition.views else None,
        retry=RETRY_SECONDS,
    )
    verification = ContinuousVerification(definition, VerifyOptions(), schedule, report)
    wait = verification.run()
    if wait is not None:
        next_at = (datetime.now(UTC) + timedelta(seconds=wait)).isoformat()
        emit("verify", json=True, summary=f"nothing is due before {next_at}", result={NEXT_AT: next_at})
    return int((ExitCode.FINDING if verification.wrong else ExitCode.OK).value)


class _ViewComparison:
    """Compares views with their SQL, and sinks of views with the log of views, once per interval."""

    def __init__(self, definition: Definition, report: Report) -> None:
        self._definition, self._report = definition, report
        self._tried_at: datetime | None = None

    def compare_due(self, catalog: Catalog) -> int:
        """Compare all views if that is due; return the number of compared rows.

        A view that cannot be compared now is tried again in the next interval, because the comparison needs Spark.
        """
        began = datetime.now(UTC)
        if not log_exists(self._definition.log.of_views) or not self._is_due(catalog, began):
            return 0
        self._tried_at = began
        verdicts = compare_views(self._definition, VerifyOptions())
        position = LogReader(self._definition.log.of_views).durable or Position(0)
        for verdict in verdicts:
            found = whole_range(verdict, began, position) if verdict.compared else None
            if found is not None:
                catalog.verified.record(self._definition.name, found)
            self._report(RangeResult(verdict, found))
        return sum(verdict.rows for verdict in verdicts)

    def _is_due(self, catalog: Catalog, now: datetime) -> bool:
        name, every = self._definition.name, timedelta(seconds=self._definition.verify.every)
        topics = [view.name for view in self._definition.views]
        catalog.verified.retain(name, NAME_OF_VIEWS, topics)
        if self._tried_at is not None and now < self._tried_at + every:
            return False
        passes = [catalog.verified.passes(name, NAME_OF_VIEWS, topic) for topic in topics]
        return any(not ranges or ranges[0][0].began + every <= now for ranges in passes)
