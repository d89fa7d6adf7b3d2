"""Events of a parked key, which are sent when a person retries its dead letter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final

import pyarrow.compute as pc

from cdc.delivery.destinations.contract import Event
from cdc.delivery.event_encoder import EventEncoder
from cdc.delivery.event_part import EventPart
from cdc.delivery.log_windows import LogWindow, next_window
from cdc.delivery.progress import ParkedKey, Progress
from cdc.delivery.transaction_boundaries import TransactionBoundaries
from cdc.errors import EventRefused
from cdc.log.reader import LogReader
from cdc.log_row import ROW_OPERATIONS, Operation
from cdc.position import ChangePosition, Position

_TRUNCATE: Final = Operation.TRUNCATE.value
_SCHEMA: Final = Operation.SCHEMA.value


class ParkedEvents:
    """Reads the events of single keys from the log."""

    def __init__(
        self,
        log: LogReader,
        encoder: EventEncoder,
        boundaries: Callable[[], TransactionBoundaries | None],
        batch: int,
    ) -> None:
        self._log = log
        self._encoder = encoder
        self._boundaries = boundaries
        self._batch = batch

    def of(self, letter: ParkedKey, progress: Progress) -> Iterator[list[Event]]:
        """Yield the events of a parked key from its first change up to the position of a progress.

        Events before the last TRUNCATE of the table that was sent are left out: sent now, they would restore a row
        that the consumer has removed. If changes of the key were trimmed from the log, its compacted state has replaced
        them. Raises the error of a change that cannot be encoded, and EventRefused for a TRUNCATE that comes too late.
        """
        self._log.refresh()
        self._check_truncate(letter, progress)
        letter = self._after_truncate(letter, progress)
        schemas = self._log.schemas(Position(letter.first.position - 1))
        for window in self._windows_of(letter, progress.position):
            boundaries = self._boundaries()
            number = None if boundaries is None else boundaries.counter.number
            for rows in window.tables():
                selected = self._encoder.selected(rows.filter(pc.less_equal(rows["position"], int(progress.position))))
                part = self._encoder.encode(selected, schemas, number)
                yield _of_key(letter, part if boundaries is None else boundaries.added(part, selected))
            if boundaries is not None:
                yield _of_key(letter, boundaries.end())

    def _check_truncate(self, letter: ParkedKey, progress: Progress) -> None:
        """Raise EventRefused if the letter is a TRUNCATE, which would remove rows that were sent after it."""
        if letter.relation is None or not letter.key or any(part is not None for part in letter.key):
            return  # the truncates of a table without a key wait together with its rows
        is_truncate = False
        for window in self._windows_of(letter, progress.position):
            for rows in window.tables():
                own = rows.filter(pc.equal(rows["relation"], letter.relation)).select(["position", "ordinal", "op"])
                for position, ordinal, operation in zip(*own.to_pydict().values(), strict=True):
                    if (position, ordinal) == letter.first:
                        is_truncate = operation == _TRUNCATE
                    elif is_truncate and operation in ROW_OPERATIONS and position <= progress.position:
                        raise EventRefused(
                            f"a TRUNCATE of table {letter.table!r} would remove rows that were sent after it",
                            remedy="discard the dead letter, then run 'cdc deliveries rewind SINK --to "
                            f"{Position(letter.first.position - 1)!s}' to send the TRUNCATE and the changes after it",
                        )

    def _after_truncate(self, letter: ParkedKey, progress: Progress) -> ParkedKey:
        """Return the letter as if its first change were after the last TRUNCATE of its table that was sent."""
        found, schemas = letter, self._log.schemas(Position(letter.first.position - 1))
        for window in self._windows_of(letter, progress.position) if letter.relation is not None else ():
            for rows in window.tables():
                of_table = pc.and_(pc.equal(rows["op"], _TRUNCATE), pc.equal(rows["relation"], letter.relation))
                wanted = pc.or_(of_table, pc.equal(rows["op"], _SCHEMA))
                part = self._encoder.encode(self._encoder.selected(rows.filter(wanted).combine_chunks()), schemas)
                for event, truncate in zip(part.events, map(part.letters, range(len(part.events))), strict=True):
                    parked = progress.parked.get(truncate.identity)
                    was_sent = parked is None or truncate.first < parked.first
                    if was_sent and letter.first <= truncate.first and event.position <= progress.position:
                        found = replace(letter, first=ChangePosition(truncate.first.position, event.ordinal + 1))
        return found

    def _windows_of(self, letter: ParkedKey, upto: Position) -> Iterator[LogWindow]:
        """Yield the windows from the first change of a parked key up to a position."""
        after = Position(letter.first.position - 1)
        while after < upto:
            self._log.refresh()
            horizon = None if self._log.compacted is None else self._log.compacted.horizon
            is_trimmed = after < self._log.oldest
            bootstrap = horizon if is_trimmed else None
            window = next_window(self._log, after, bootstrap, self._batch, self._encoder.tables)
            if window is None:
                return
            yield window
            after = window.upto


def _of_key(letter: ParkedKey, part: EventPart) -> list[Event]:
    for parked, refusal in part.refused:
        if parked.identity == letter.identity and parked.first >= letter.first:
            raise refusal
    return [
        event
        for number, event in enumerate(part.events)
        if (event.position, event.ordinal) >= letter.first and part.letters(number).identity == letter.identity
    ]
