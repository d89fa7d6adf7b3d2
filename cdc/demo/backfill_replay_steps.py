"""Steps during the workload: time travel, then a backfill and a replay, each followed by a verification."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, Final

from cdc.catalog import Catalog
from cdc.demo import terminal
from cdc.demo.processes import last_line, pipelines_command
from cdc.demo.step_results import POLL_INTERVAL, Step, StepResult, run_step
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.verification_step import verify
from cdc.errors import ChildFailed

STEP_SECONDS: Final = 120.0
RANGE: Final = "1..500"
STEP_TEXTS: Final = {
    "backfill": f"reading orders {RANGE} again, for the lake only, while the workload continues; then verify",
    "replay": "rebuilding the search index from the log alone and switching to it; then verify",
}


class StepSequence:
    """The steps that run during the workload."""

    def __init__(self, time_travel: TimeTravelStep, stop: Event) -> None:
        self._time_travel, self._stop = time_travel, stop
        self._workspace, self._screen = time_travel.queries.workspace, time_travel.screen

    def run(self) -> list[Step]:
        """Run the steps until the demo is stopped; a step that fails counts as not equal."""
        steps = self._time_travel.run()
        for name, rows, arguments in (
            ("backfill", self._backfill, "backfill ls"),
            ("replay", self._replay, "replay find --dry-run"),
        ):
            if self._stop.is_set():
                break
            self._screen.doing(name, STEP_TEXTS[name])
            steps.append(run_step(self._screen, name, partial(self._run_and_verify, rows, arguments)))
        return steps

    def _run_and_verify(self, act: Callable[[], int], arguments: str) -> StepResult:
        """Run an action, then verify."""
        began = self._screen.seconds
        count = act()
        seconds = self._screen.seconds - began
        tables = verify(self._workspace)
        equal = sum(table.equal for table in tables)
        text = f"{count:,} rows in {seconds:.1f} s · verify {equal}/{len(tables)} tables equal"
        return StepResult(
            text, terminal.cdc_command(arguments, self._workspace.definition), equal == len(tables), count
        )

    def _backfill(self) -> int:
        """Backfill some orders into the lake only."""
        arguments = (
            "backfill",
            "shop.orders",
            "--keys",
            RANGE,
            "--sink",
            "lake",
            "-c",
            str(self._workspace.definition),
        )
        result = self._run([sys.executable, "-m", "cdc", *arguments, "--json"])
        job, never = int(result["id"]), Event()
        with Catalog.open(self._workspace.catalog_url) as catalog:
            while (found := catalog.commands.get(job)) is None or found.state == "pending":
                never.wait(POLL_INTERVAL)
        copied: dict[str, Any] = found.result or {}
        if copied.get("state") != "done":
            raise ChildFailed(f"the backfill of the demo ended as {copied.get('state')}: {copied.get('error')}")
        return sum(table["rows"] for table in copied["tables"].values())

    def _replay(self) -> int:
        """Rebuild the search index from the log."""
        return int(self._run([*pipelines_command("replay", self._workspace.definition, "find", "--json")])["rows"])

    def _run(self, line: Sequence[str]) -> dict[str, Any]:
        output = self._workspace.output("tour")
        with output.open("ab") as errors:
            ended = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=STEP_SECONDS, check=False
            )
        if ended.returncode:
            raise ChildFailed(f"{' '.join(line[2:5])} ended with status {ended.returncode}: {last_line(output)}")
        result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])["result"]
        return result
