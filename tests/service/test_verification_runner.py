"""The runner of the continuous verification: when it waits, and what it records of a child process that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from cdc.catalog import Catalog, ProcessReport
from cdc.catalog.verification_state import VerificationRecord, VerificationState
from cdc.config.verification import Verification
from cdc.service.machine_load import MachineLoad
from cdc.service.status import pipeline_status
from cdc.service.verification_runner import FAILING_AFTER, RunnerTiming, VerificationRunner
from tests.fixtures.waiting import until
from tests.service.pipeline import NAME, definition, fill, new_catalog

AT_ONCE = RunnerTiming(settle=0.0, poll=0.02, retry=0.01)
BUSY = MachineLoad(cores=2, pipeline=0.1, busy_share=1.0)


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    with new_catalog(tmp_path) as opened:
        fill(opened)
        yield opened


@contextmanager
def running(
    catalog: Catalog, folder: Path, *, timing: RunnerTiming = AT_ONCE, load: MachineLoad | None = None, **verify: Any
) -> Iterator[Callable[[VerificationState], VerificationRecord]]:
    """A runner beside the block; the function waits for a state. The definition file does not exist."""
    settings = Verification(**{"every": "1h", **verify})
    wanted = definition(folder).model_copy(update={"verify": settings})
    runner = VerificationRunner(catalog, wanted, folder / "missing.yaml", lambda: load, timing)

    def recorded(state: VerificationState) -> VerificationRecord:
        def asked() -> VerificationRecord | None:
            found = catalog.verification.get(NAME)
            return found if found is not None and found.state is state else None

        return until(asked, f"state {state}")

    runner.start()
    try:
        yield recorded
    finally:
        runner.stop()


def test_off_is_a_state(catalog: Catalog, tmp_path: Path) -> None:
    with running(catalog, tmp_path, every="off") as recorded:
        assert recorded(VerificationState.OFF).reason == "'verify: off' in the definition"
    shown = pipeline_status(catalog, NAME, datetime.now(UTC)).verification
    assert shown is not None
    assert (shown.state, shown.detail) == ("off", "'verify: off' in the definition")


def test_it_waits_for_its_hours(catalog: Catalog, tmp_path: Path) -> None:
    later = datetime.now(UTC) + timedelta(hours=2)
    between = f"{later:%H:%M}-{later + timedelta(hours=1):%H:%M}"
    with running(catalog, tmp_path, between=between) as recorded:
        assert recorded(VerificationState.PAUSED).reason == f"it is not between {between} UTC"


@pytest.mark.parametrize(
    ("timing", "reason"),
    [(AT_ONCE, "the machine is busy"), (RunnerTiming(poll=0.02), "the server process has just started")],
)
def test_it_waits_for_a_machine_that_has_time(
    catalog: Catalog, tmp_path: Path, timing: RunnerTiming, reason: str
) -> None:
    with running(catalog, tmp_path, timing=timing, load=BUSY) as recorded:
        assert recorded(VerificationState.PAUSED).reason == reason


def test_the_next_pass_of_an_earlier_server_process_is_awaited(catalog: Catalog, tmp_path: Path) -> None:
    next_at = (datetime.now(UTC) + timedelta(minutes=30)).isoformat()
    before = VerificationRecord(state=VerificationState.WAITING, every=3600.0, next_at=next_at)
    catalog.verification.put(NAME, before)
    with running(catalog, tmp_path, load=BUSY) as recorded:
        assert recorded(VerificationState.WAITING) == before
    with running(catalog, tmp_path, load=BUSY, every="10m") as recorded:  # the interval is another one
        recorded(VerificationState.PAUSED)


def test_on_a_machine_that_stays_busy_a_pass_begins_in_the_second_half_of_its_interval(
    catalog: Catalog, tmp_path: Path
) -> None:
    next_at = (datetime.now(UTC) - timedelta(minutes=31)).isoformat()
    catalog.verification.put(
        NAME, VerificationRecord(state=VerificationState.PAUSED, every=3600.0, next_at=next_at, reason="busy")
    )
    with running(catalog, tmp_path, load=BUSY) as recorded:
        recorded(VerificationState.RUNNING)


@pytest.mark.slow
def test_a_process_that_fails_again_and_again_is_a_problem_with_its_error(catalog: Catalog, tmp_path: Path) -> None:
    """Its definition file does not exist."""
    assert FAILING_AFTER > 1
    with running(catalog, tmp_path) as recorded:
        record = recorded(VerificationState.FAILING)
    assert record.error is not None
    catalog.processes.report(ProcessReport(NAME, "server", 1, "running"))
    (problem,) = [
        one for one in pipeline_status(catalog, NAME, datetime.now(UTC)).problems if one.subject == "verification"
    ]
    assert problem.code == record.error["code"]
