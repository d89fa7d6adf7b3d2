"""Tour: while the shop goes on, the past of the lake, then a backfill and a replay, each with its proof."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from threading import Event
from typing import Any, Final

from cdc.catalog import Catalog
from cdc.demo import shell_commands
from cdc.demo.processes import command, last_line
from cdc.demo.step import LOOK_EVERY, Step, StepResult, taken
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.verification_step import verify
from cdc.errors import ChildFailed

STEP_SECONDS: Final = 120.0
RANGE: Final = "1..500"
TOLD: Final = {
    "backfill": f"orders {RANGE} are read again, for the lake alone, while the shop goes on; then verify",
    "replay": "the search index is built anew from the log, without the source, and put in place; then verify",
}


class StepSequence:
    """Shows what can be done to a pipeline that runs."""

    def __init__(self, past: TimeTravelStep, stop: Event) -> None:
        self._past, self._stop = past, stop
        self._ground, self._screen = past.shelf.ground, past.screen

    def go(self) -> list[Step]:
        """Do it all; ends early when the demo is stopped, and a part that fails is told and makes its step unequal."""
        steps = self._past.go()
        for name, rows, words in (
            ("backfill", self._backfill, "backfill ls"),
            ("replay", self._replay, "replay find --dry-run"),
        ):
            if self._stop.is_set():
                break
            self._screen.doing(name, TOLD[name])
            steps.append(taken(self._screen, name, partial(self._proven, rows, words)))
        return steps

    def _proven(self, act: Callable[[], int], words: str) -> StepResult:
        """Act, then verify."""
        began = self._screen.seconds
        count = act()
        seconds = self._screen.seconds - began
        tables = verify(self._ground)
        equal = sum(table.equal for table in tables)
        told = f"{count:,} rows in {seconds:.1f} s · verify {equal}/{len(tables)} tables equal"
        return StepResult(told, shell_commands.command(words, self._ground.definition), equal == len(tables), count)

    def _backfill(self) -> int:
        """Some orders into the lake alone."""
        asked = ("backfill", "shop.orders", "--keys", RANGE, "--sink", "lake", "-c", str(self._ground.definition))
        told = self._run([sys.executable, "-m", "cdc", *asked, "--json"])
        job, waited = int(told["id"]), Event()
        with Catalog.open(self._ground.catalog_url) as catalog:
            while (found := catalog.commands.get(job)) is None or found.state == "pending":
                waited.wait(LOOK_EVERY)
        result: dict[str, Any] = found.result or {}
        if result.get("state") != "done":
            raise ChildFailed(f"the backfill ended as {result.get('state')}: {result.get('error')}")
        return sum(table["rows"] for table in result["tables"].values())

    def _replay(self) -> int:
        """The search index anew, from the log alone."""
        return int(self._run([*command("replay", self._ground.definition, "find", "--json")])["rows"])

    def _run(self, line: Sequence[str]) -> dict[str, Any]:
        output = self._ground.output("tour")
        with output.open("ab") as errors:
            ended = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=STEP_SECONDS, check=False
            )
        if ended.returncode:
            raise ChildFailed(f"{' '.join(line[2:5])} ended with status {ended.returncode}: {last_line(output)}")
        told: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])["result"]
        return told
