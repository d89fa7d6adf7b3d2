"""Letters: a row that the lake cannot take, parked with its key alone, tried again, and mended at the source."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from cdc.catalog import Catalog, DeadLetter
from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterOutcome, DeadLetterRequest, answers, say
from cdc.demo import shell_commands
from cdc.demo.lake_queries import LakeQueries
from cdc.demo.pipeline_probe import PIPELINE
from cdc.demo.statements import named
from cdc.demo.step import PATIENCE, Step, StepResult, Wait, taken
from cdc.demo.terminal import Terminal
from cdc.demo.wal_marker import mark
from cdc.errors import UnknownName
from cdc.postgres.connection import connect
from cdc.postgres.sqlstate import map_errors

TABLE: Final = "shop.orders"
BESIDE: Final = "changed beside a row that is parked"
_TOTAL: Final = "SELECT total FROM shop.orders WHERE id = {}"
_COMMENT: Final = "SELECT comment FROM shop.orders WHERE id = {}"


@dataclass(slots=True)
class DeadLetterStep:
    """Breaks one order and mends it; nobody else may write to the shop meanwhile."""

    shelf: LakeQueries
    screen: Terminal
    dsn: str
    """Of the shop."""
    catalog: Catalog
    patience: float = PATIENCE
    """Seconds for each of the waits."""
    _sql: dict[str, bytes] = field(default_factory=lambda: named("closing"))
    _order: int = 0

    def go(self) -> list[Step]:
        """Park, try again, mend: the order is mended at the source whatever came of parking it."""
        return [taken(self.screen, "parked", self.park), taken(self.screen, "retried", self.retry)]

    def park(self) -> StepResult:
        """Give an order a total of NaN and another one a comment, and wait until only the first is parked."""
        self._arrive()
        self._order, other = self._run("newest_order")
        (before,) = self._run("break_order", order=self._order)
        self._run("comment_order", order=other, words=BESIDE)
        self._arrive()
        letter = Wait(self.screen, "parked", self.patience).until(
            f"order {self._order} is in dead letters", self._letter
        )
        kept = self._in_lake(_TOTAL, self._order) == before
        goes_on = self._in_lake(_COMMENT, other) == BESIDE
        told = (
            f"order {self._order} got a total of NaN: {letter.code}, dead letter {letter.id}; the lake "
            f"{'keeps' if kept else 'LOST'} its {before:,}, order {other} {'goes on' if goes_on else 'STANDS STILL'}"
        )
        facts = {"letter": letter.id, "key": list(letter.key), "code": letter.code, "others_go_on": goes_on}
        return StepResult(told, self._hint(f"dlq show {letter.id}"), kept and goes_on, 1, facts)

    def retry(self) -> StepResult:
        """Have it tried as it is, which must be refused, then mend it at the source: what fits takes its place."""
        if not self._order:
            raise UnknownName("there is no order to mend", remedy="let the workload place one")
        letter = self._letter()
        try:
            outcome = "not parked" if letter is None else self._ask(letter)
        finally:
            (mended,) = self._run("mend_order", order=self._order)
        self._arrive()
        wait = Wait(self.screen, "retried", self.patience)
        wait.until(f"order {self._order} is in dead letters no more", lambda: self._letter() is None)
        total = self._in_lake(_TOTAL, self._order)
        equal = outcome == DeadLetterOutcome.PARKED and total == mended
        retried = "refused again" if outcome == DeadLetterOutcome.PARKED else outcome
        told = (
            f"{retried} as long as it is NaN; mended at the source, "
            f"order {self._order} comes through: {'nothing' if total is None else f'{total:,}'} in the lake"
        )
        facts = {"outcome": outcome, "mended": str(mended), "in_lake": str(total)}
        return StepResult(told, self._hint("dlq ls"), equal, 1, facts)

    def _ask(self, letter: DeadLetter) -> str:
        posted = say(self.catalog, PIPELINE, [letter], DeadLetterRequest(DeadLetterAction.RETRY, "cdc demo"))
        return str(answers(self.catalog, posted).get(letter.id, "not answered"))

    def _arrive(self) -> None:
        """Wait until the lake has everything that was committed until now, but for what is parked."""
        last = mark(self.dsn, "closing")
        wait = Wait(self.screen, "lake", self.patience)
        wait.until(f"the lake stands behind {last}", lambda: self.shelf.has(self.catalog, last))

    def _letter(self) -> DeadLetter | None:
        letters = self.catalog.dead_letters.ls(PIPELINE)
        mine = (self.shelf.name, TABLE, (str(self._order),))
        return next((letter for letter in letters if (letter.sink, letter.topic, letter.key) == mine), None)

    def _run(self, name: str, **parameters: object) -> tuple[Any, ...]:
        """One statement in a transaction of its own: the row that it hands back."""
        with connect(self.dsn, application_name="cdc demo") as connection, map_errors():
            cursor = connection.execute(self._sql[name], parameters)
            row: Any = cursor.fetchone() if cursor.description else None
        return tuple(row or ())

    def _in_lake(self, sql: str, order: int) -> Decimal | str | None:
        rows = self.shelf.rows(sql.format(order))
        return rows[0][0] if rows else None

    def _hint(self, words: str) -> str:
        return shell_commands.command(words, self.shelf.ground.definition)
