"""Steps of the demo that change sinks, during the workload and after it.

- During the workload: time travel, then a backfill and a replay, each followed by a verification.
- Dead letter: the lake refuses a row, and the row becomes a dead letter. A retry fails. Then an update at the source
  corrects the row.
- History: a new sink gets every version of the products (SCD type 2) from the log alone.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from threading import Event
from typing import Any, Final, Self

from cdc.catalog import Catalog, DeadLetter
from cdc.catalog.dead_letter_requests import (
    DeadLetterAction,
    DeadLetterOutcome,
    DeadLetterRequest,
    await_outcomes,
    request_action,
)
from cdc.demo import terminal
from cdc.demo.pipeline_observer import PIPELINE
from cdc.demo.processes import DemoProcesses, last_line, pipelines_command
from cdc.demo.query_runner import LakeQueries
from cdc.demo.shop_workload import named_statements, write_marker
from cdc.demo.step_results import POLL_INTERVAL, WAIT_SECONDS, Step, StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.demo.time_travel_step import TimeTravelStep
from cdc.demo.verification_step import envelope, verify
from cdc.errors import ChildFailed, UnknownName
from cdc.postgres.connection import connect
from cdc.postgres.sqlstate import map_errors
from cdc.service.pipeline_children import Child
from cdc.target_names import END_COLUMN, FROM_COLUMN, START_COLUMN, TO_COLUMN

STEP_SECONDS: Final = 120.0
RANGE: Final = "1..500"
STEP_TEXTS: Final = {
    "backfill": f"reading orders {RANGE} again, for the lake only, while the workload continues; then verify",
    "replay": "rebuilding the search index from the log alone and switching to it; then verify",
}


class StepSequence:
    """The steps that run during the workload: time travel, backfill and replay."""

    def __init__(self, time_travel: TimeTravelStep, stop: Event) -> None:
        self._time_travel, self._stop = time_travel, stop
        self._workspace, self._screen = time_travel.queries.workspace, time_travel.screen

    def run(self) -> list[Step]:
        """Run the steps one after the other, and return the completed steps; after a stop request no step begins."""
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
        """Call `act`, which returns the number of rows that it wrote, and then verify every target."""
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
        """Backfill the orders of RANGE into the lake only, and return the number of copied rows."""
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
        """Replay the log into a new search index, and return the number of rows that the replay reports."""
        return int(self._run([*pipelines_command("replay", self._workspace.definition, "find", "--json")])["rows"])

    def _run(self, line: Sequence[str]) -> dict[str, Any]:
        output = self._workspace.output("tour")
        with output.open("ab") as errors:
            ended = subprocess.run(
                line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, timeout=STEP_SECONDS, check=False
            )
        # with --json a command prints its error on standard output
        printed = envelope(ended.stdout)
        if ended.returncode:
            reason = (printed.get("error") or {}).get("message") or last_line(output)
            raise ChildFailed(f"{' '.join(line[2:5])} ended with status {ended.returncode}: {reason}")
        result: dict[str, Any] = printed["result"]
        return result


TABLE: Final = "shop.orders"
OTHER_COMMENT: Final = "changed while another row is quarantined"
_TOTAL: Final = "SELECT total FROM shop.orders WHERE id = {}"
_COMMENT: Final = "SELECT comment FROM shop.orders WHERE id = {}"


@dataclass(slots=True)
class DeadLetterStep:
    """Makes one order invalid so that its row becomes a dead letter, and then corrects the order at the source.

    No workload may run at the same time.
    """

    queries: LakeQueries
    screen: Terminal
    dsn: str
    """Connection string of the shop's database."""
    catalog: Catalog
    wait_seconds: float = WAIT_SECONDS
    """Maximum seconds for each wait."""
    _sql: dict[str, bytes] = field(default_factory=lambda: named_statements("closing"))
    _order: int = 0

    def run(self) -> list[Step]:
        """Run `park` and then `retry`. If `park` fails after it changed the order, `retry` still corrects the order."""
        return [run_step(self.screen, "parked", self.park), run_step(self.screen, "retried", self.retry)]

    def park(self) -> StepResult:
        """Set the total of one order to NaN, and wait until this order is a dead letter.

        The step changes the comment of a second order as well; the lake must apply this change.
        """
        self._wait_for_lake()
        self._order, other = self._run("newest_order")
        (before,) = self._run("break_order", order=self._order)
        self._run("comment_order", order=other, words=OTHER_COMMENT)
        self._wait_for_lake()
        letter = Wait(self.screen, "parked", self.wait_seconds).until(
            f"order {self._order} is in the dead letters", self._letter
        )
        is_kept = self._in_lake(_TOTAL, self._order) == before
        is_other_applied = self._in_lake(_COMMENT, other) == OTHER_COMMENT
        text = (
            f"order {self._order} got a total of NaN: {letter.code}, dead letter {letter.id}; the lake "
            f"{'keeps' if is_kept else 'LOST'} the old total {before:,}; "
            f"the change of order {other} {'is applied' if is_other_applied else 'IS NOT APPLIED'}"
        )
        facts = {"letter": letter.id, "key": list(letter.key), "code": letter.code, "others_go_on": is_other_applied}
        return StepResult(text, self._hint(f"dlq show {letter.id}"), is_kept and is_other_applied, 1, facts)

    def retry(self) -> StepResult:
        """Retry the dead letter, which the lake must refuse again; then correct its row at the source."""
        if not self._order:
            raise UnknownName(
                "step 'retried' has no row of shop.orders to change, because step 'parked' failed",
                remedy="read the error of the step 'parked'",
            )
        letter = self._letter()
        try:
            outcome = "not parked" if letter is None else self._request_retry(letter)
        finally:
            (repaired,) = self._run("repair_order", order=self._order)
        self._wait_for_lake()
        wait = Wait(self.screen, "retried", self.wait_seconds)
        wait.until(f"order {self._order} is no longer in the dead letters", lambda: self._letter() is None)
        total = self._in_lake(_TOTAL, self._order)
        equal = outcome == DeadLetterOutcome.PARKED and total == repaired
        retried = "refused again" if outcome == DeadLetterOutcome.PARKED else outcome
        text = (
            f"{retried} while the total is NaN; after the repair at the source, "
            f"the total of order {self._order} is {'missing' if total is None else f'{total:,}'} in the lake"
        )
        facts = {"outcome": outcome, "mended": str(repaired), "in_lake": str(total)}
        return StepResult(text, self._hint("dlq ls"), equal, 1, facts)

    def _request_retry(self, letter: DeadLetter) -> str:
        posted = request_action(self.catalog, PIPELINE, [letter], DeadLetterRequest(DeadLetterAction.RETRY, "cdc demo"))
        return str(await_outcomes(self.catalog, posted).get(letter.id, "not answered"))

    def _wait_for_lake(self) -> None:
        """Wait until the lake has applied all transactions that are committed now; parked rows do not delay this."""
        last = write_marker(self.dsn, "closing")
        wait = Wait(self.screen, "lake", self.wait_seconds)
        wait.until(f"the lake has applied the log up to {last}", lambda: self.queries.has_reached(self.catalog, last))

    def _letter(self) -> DeadLetter | None:
        letters = self.catalog.dead_letters.ls(PIPELINE)
        order = (self.queries.name, TABLE, (str(self._order),))
        return next((letter for letter in letters if (letter.sink, letter.topic, letter.key) == order), None)

    def _run(self, name: str, **parameters: object) -> tuple[Any, ...]:
        """Run one named statement in its own transaction; return its first result row, or () if it returns no row."""
        with connect(self.dsn, application_name="cdc demo") as connection, map_errors():
            cursor = connection.execute(self._sql[name], parameters)
            row: Any = cursor.fetchone() if cursor.description else None
        return tuple(row or ())

    def _in_lake(self, sql: str, order: int) -> Decimal | str | None:
        rows = self.queries.rows(sql.format(order))
        return rows[0][0] if rows else None

    def _hint(self, words: str) -> str:
        return terminal.cdc_command(words, self.queries.workspace.definition)


HISTORY: Final = "history"
BUILD_SECONDS: Final = 120.0
"""Maximum seconds for a second Spark session to start on two busy cores and to merge its first batch."""
MOST_PRICES: Final = 3
"""Maximum number of prices to print for a product."""
_NOW: Final = "SELECT id, price, stock FROM shop.products ORDER BY id"
_OPEN: Final = f'SELECT id, price, stock FROM shop.products WHERE "{END_COLUMN}" IS NULL ORDER BY id'
_COUNTED: Final = "SELECT id, count(*) AS n FROM shop.products GROUP BY id ORDER BY n DESC, id"
_PRICES: Final = f'SELECT price FROM shop.products WHERE id = {{}} ORDER BY "{START_COLUMN}"'


@dataclass(slots=True)
class HistorySinkStep:
    """Builds the history sink and compares its rows with the lake.

    As a context manager it runs a second apply process, which fills the history sink.
    """

    queries: LakeQueries
    """Queries on the lake, which contains the latest state."""
    screen: Terminal
    dsn: str
    """Connection string of the shop's database."""
    catalog: Catalog
    _children: DemoProcesses = field(init=False)

    def __post_init__(self) -> None:
        workspace = self.queries.workspace
        command = pipelines_command("apply", workspace.definition, "--sink", HISTORY)
        self._children = DemoProcesses(workspace, [Child(HISTORY, tuple(command))])

    def __enter__(self) -> Self:
        self.queries.workspace.add_history()
        self._children.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._children.kill()  # the step has ended, and killing an apply process is safe at any time

    def run(self) -> list[Step]:
        """Wait until the history sink is filled, and compare its rows with the lake."""
        self.screen.doing(HISTORY, "a new sink: products as SCD type 2, from the log alone, in a second apply process")
        return [run_step(self.screen, HISTORY, self.compare)]

    def compare(self) -> StepResult:
        """Wait until lake and history sink have applied the whole log, and then compare their current rows."""
        last = write_marker(self.dsn, "closing")
        history = LakeQueries(self.queries.workspace, HISTORY)
        wait = Wait(self.screen, HISTORY, BUILD_SECONDS)
        wait.until(
            f"the sinks lake and {HISTORY} have applied the whole log",
            lambda: self.queries.has_reached(self.catalog, last) and history.has_reached(self.catalog, last),
        )
        return self.compare_now(history)

    def compare_now(self, history: LakeQueries) -> StepResult:
        """Compare the products in the lake with the open versions of the products in the history sink."""
        now, open_now = self.queries.rows(_NOW), history.rows(_OPEN)
        counted = history.rows(_COUNTED)
        product, versions = counted[0]
        latest = next(price for key, price, _ in now if key == product)
        prices = [price for (price,) in history.rows(_PRICES.format(product))]
        text = (
            f"product {product}: SCD1 {_price_list([latest])} · SCD2 {_price_list(prices)}; "
            f"{len(now)} rows, {sum(n for _, n in counted)} versions, {len(open_now)} of them open"
            f"{', equal to the lake' if now == open_now else ': NOT EQUAL'}"
        )
        query = f"select price, {FROM_COLUMN}, {TO_COLUMN} from shop.products where id = {product} order by 2"
        hint = terminal.cdc_command(f'query "{query}" --sink {HISTORY}', self.queries.workspace.definition)
        facts = {"product": product, "versions": versions, "prices": [str(price) for price in prices]}
        return StepResult(text, hint, now == open_now and bool(now), sum(n for _, n in counted), facts)


def _price_list(prices: list[Decimal]) -> str:
    shown = prices[-MOST_PRICES:]
    return " → ".join((["…"] if len(prices) > len(shown) else []) + [f"{price:,}" for price in shown])
