"""Tour: a backfill and a replay while the shop goes on, each with the proof that nothing was lost by it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event
from typing import Any, Final

from cdc.catalog import Catalog
from cdc.demo import hints
from cdc.demo.children import command, last_line
from cdc.demo.ground import Ground
from cdc.demo.proof import verify
from cdc.demo.screen import Screen
from cdc.errors import ChildFailed

STEP_SECONDS: Final = 120.0
LOOK_EVERY: Final = 0.1
RANGE: Final = "1..500"
TOLD: Final = {
    "backfill": f"orders {RANGE} are read again, for the lake alone, while the shop goes on; then verify",
    "replay": "the search index is built anew from the log, without the source, and put in place; then verify",
}


@dataclass(frozen=True, slots=True)
class Step:
    """One stop of the tour."""

    name: str
    rows: int
    """Read again at the source, or of the log."""
    seconds: float
    equal: bool
    """Whether every target equalled its source afterwards, while the workload went on."""


class Tour:
    """Shows what can be done to a pipeline that runs."""

    def __init__(self, ground: Ground, screen: Screen, stop: Event) -> None:
        self._ground, self._screen, self._stop = ground, screen, stop

    def go(self) -> list[Step]:
        """Do it all; ends early when the demo is stopped. Raises ChildFailed when a command fails."""
        steps: list[Step] = []
        for name, rows in (("backfill", self._backfill), ("replay", self._replay)):
            if self._stop.is_set():
                break
            self._screen.doing(name, TOLD[name])
            began = self._screen.seconds
            count = rows()
            seconds = round(self._screen.seconds - began, 2)
            tables = verify(self._ground)
            equal = all(table.equal for table in tables)
            steps.append(Step(name, count, seconds, equal))
            told = (
                f"{count:,} rows in {seconds:.1f} s · verify {sum(t.equal for t in tables)}/{len(tables)} tables equal"
            )
            report = self._screen.done if equal else self._screen.failed
            report(name, f"{told}   try: {self._hint(name)}")
        return steps

    def _hint(self, name: str) -> str:
        words = {"backfill": "backfill ls", "replay": "replay find --dry-run"}
        return hints.command(words[name], self._ground.definition)

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
