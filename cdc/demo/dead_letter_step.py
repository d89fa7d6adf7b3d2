"""Dead letter step: the lake refuses a row, which becomes a dead letter, is retried, and is repaired at the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from cdc.catalog import Catalog, DeadLetter
from cdc.catalog.dead_letter_requests import (
    DeadLetterAction,
    DeadLetterOutcome,
    DeadLetterRequest,
    await_outcomes,
    request_action,
)
from cdc.demo import terminal
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.pipeline_probe import PIPELINE
from cdc.demo.shop_workload import named_statements, write_marker
from cdc.demo.step_results import WAIT_SECONDS, Step, StepResult, Wait, run_step
from cdc.demo.terminal import Terminal
from cdc.errors import UnknownName
from cdc.postgres.connection import connect
from cdc.postgres.sqlstate import map_errors

TABLE: Final = "shop.orders"
OTHER_COMMENT: Final = "changed while another row is quarantined"
_TOTAL: Final = "SELECT total FROM shop.orders WHERE id = {}"
_COMMENT: Final = "SELECT comment FROM shop.orders WHERE id = {}"


@dataclass(slots=True)
class DeadLetterStep:
    """Breaks one order and repairs it; the workload must not write to the shop at the same time."""

    queries: LakeQueries
    screen: Terminal
    dsn: str
    """Connection string of the shop."""
    catalog: Catalog
    wait_seconds: float = WAIT_SECONDS
    """Seconds that each wait may take."""
    _sql: dict[str, bytes] = field(default_factory=lambda: named_statements("closing"))
    _order: int = 0

    def run(self) -> list[Step]:
        """Run both parts; the second repairs the order at the source even if the first failed."""
        return [run_step(self.screen, "parked", self.park), run_step(self.screen, "retried", self.retry)]

    def park(self) -> StepResult:
        """Set the total of one order to NaN, comment another one, and wait until the first is a dead letter."""
        self._wait_for_lake()
        self._order, other = self._run("newest_order")
        (before,) = self._run("break_order", order=self._order)
        self._run("comment_order", order=other, words=OTHER_COMMENT)
        self._wait_for_lake()
        letter = Wait(self.screen, "parked", self.wait_seconds).until(
            f"order {self._order} is in dead letters", self._letter
        )
        is_kept = self._in_lake(_TOTAL, self._order) == before
        is_other_applied = self._in_lake(_COMMENT, other) == OTHER_COMMENT
        text = (
            f"order {self._order} got a total of NaN: {letter.code}, dead letter {letter.id}; the lake "
            f"{'keeps' if is_kept else 'LOST'} its {before:,}, "
            f"order {other} {'is applied' if is_other_applied else 'IS NOT APPLIED'}"
        )
        facts = {"letter": letter.id, "key": list(letter.key), "code": letter.code, "others_go_on": is_other_applied}
        return StepResult(text, self._hint(f"dlq show {letter.id}"), is_kept and is_other_applied, 1, facts)

    def retry(self) -> StepResult:
        """Retry the unchanged row, which the lake must refuse again; then repair it at the source."""
        if not self._order:
            raise UnknownName("the shop has no order to break", remedy="let the workload place an order")
        letter = self._letter()
        try:
            outcome = "not parked" if letter is None else self._request_retry(letter)
        finally:
            (repaired,) = self._run("repair_order", order=self._order)
        self._wait_for_lake()
        wait = Wait(self.screen, "retried", self.wait_seconds)
        wait.until(f"order {self._order} is in dead letters no more", lambda: self._letter() is None)
        total = self._in_lake(_TOTAL, self._order)
        equal = outcome == DeadLetterOutcome.PARKED and total == repaired
        retried = "refused again" if outcome == DeadLetterOutcome.PARKED else outcome
        text = (
            f"{retried} while it is NaN; repaired at the source, "
            f"order {self._order} arrives: {'nothing' if total is None else f'{total:,}'} in the lake"
        )
        facts = {"outcome": outcome, "mended": str(repaired), "in_lake": str(total)}
        return StepResult(text, self._hint("dlq ls"), equal, 1, facts)

    def _request_retry(self, letter: DeadLetter) -> str:
        posted = request_action(self.catalog, PIPELINE, [letter], DeadLetterRequest(DeadLetterAction.RETRY, "cdc demo"))
        return str(await_outcomes(self.catalog, posted).get(letter.id, "not answered"))

    def _wait_for_lake(self) -> None:
        """Wait until the lake has every commit up to now, except the quarantined row."""
        last = write_marker(self.dsn, "closing")
        wait = Wait(self.screen, "lake", self.wait_seconds)
        wait.until(f"the lake has applied the log up to {last}", lambda: self.queries.has_reached(self.catalog, last))

    def _letter(self) -> DeadLetter | None:
        letters = self.catalog.dead_letters.ls(PIPELINE)
        order = (self.queries.name, TABLE, (str(self._order),))
        return next((letter for letter in letters if (letter.sink, letter.topic, letter.key) == order), None)

    def _run(self, name: str, **parameters: object) -> tuple[Any, ...]:
        """Run one statement in its own transaction and return the row that it returns."""
        with connect(self.dsn, application_name="cdc demo") as connection, map_errors():
            cursor = connection.execute(self._sql[name], parameters)
            row: Any = cursor.fetchone() if cursor.description else None
        return tuple(row or ())

    def _in_lake(self, sql: str, order: int) -> Decimal | str | None:
        rows = self.queries.rows(sql.format(order))
        return rows[0][0] if rows else None

    def _hint(self, words: str) -> str:
        return terminal.cdc_command(words, self.queries.workspace.definition)
