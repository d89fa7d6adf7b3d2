"""Parking: a row that a target cannot take is set aside with its key, and everything else goes on.

Theory. A batch is merged as it is while nothing of its table is parked and nothing fails. Otherwise its rows are laid
over what is parked, those that the target refuses are found, and what is parked then is written beside the sink,
**before** the rest is merged. What was written counts once the target has come to the end of the batch, so a crash
between the two leaves the keys as they were, and the batch comes again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from threading import Lock
from typing import Final

import numpy as np
import pyarrow as pa
import structlog

from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterOutcome
from cdc.config import DeadLetterSettings
from cdc.errors import CdcError, DeadLetterLimitExceeded, MissingBase, ValueNotRepresentable
from cdc.failpoint import hit
from cdc.stores.dead_letter_rows import Key, ParkedRow
from pipelines.dead_letters.full_history import again, forgetting, queue, queued, refused_again, rows_behind
from pipelines.dead_letters.latest_state import Held, changed, keys_of, offer, set_aside, touches
from pipelines.sinks.contract import ParkingSink, Sink, TableBatch, TableRecord

JUDGED: Final = 100
"""Keys that a batch has to change to be judged by the share of them that waits: one of one is no sign."""
Place = tuple[int, Key]
"""Relation and key."""

log = structlog.get_logger("apply")


class Quarantine:
    """What is parked of one sink's tables; a sink that cannot park is passed through."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._relations: set[int] = set()
        """Of which something is, or was, parked."""
        self._due: dict[Place, DeadLetterAction] = {}
        self._merged: dict[Place, DeadLetterOutcome] = {}
        self._outcomes: dict[Place, DeadLetterOutcome] = {}
        self._applied: dict[int, int] = {}
        """By relation, where its target stood after its last batch, published or not."""
        self._lock = Lock()

    def listed(self, tables: Mapping[int, TableRecord]) -> dict[int, TableRecord]:
        """The tables of a sink that was just opened, with what is parked of them where they stand."""
        if not isinstance(self._sink, ParkingSink):
            return dict(tables)
        held = {relation: self._sink.parked.rows_of(relation) for relation in tables}
        self._relations |= {relation for relation, rows in held.items() if rows}
        return {relation: _with_keys(table, held[relation]) for relation, table in tables.items()}

    @property
    def rows(self) -> list[ParkedRow]:
        """Everything that is parked, oldest change first."""
        if not isinstance(self._sink, ParkingSink):
            return []
        with self._lock:
            relations = sorted(self._relations)
        held = [row for relation in relations for row in self._sink.parked.rows_of(relation).values()]
        return sorted(held, key=lambda row: row.place)

    @property
    def due(self) -> set[int]:
        """Relations of which keys wait to be tried again or let go: the next batch is theirs too."""
        with self._lock:
            return {relation for relation, _ in self._due}

    def ask(self, place: Place, verb: DeadLetterAction) -> None:
        """Have the next batch do it; `outcome` tells when that is published."""
        with self._lock:
            self._outcomes.pop(place, None)
            self._due[place] = verb

    def outcome(self, place: Place) -> DeadLetterOutcome | None:
        """What became of it; None while that is not published."""
        with self._lock:
            return self._outcomes.get(place)

    def published(self) -> None:
        """The batch was: what it did with parked keys can be told."""
        with self._lock:
            self._outcomes |= self._merged
            self._merged = {}

    def apply(self, before: TableRecord | None, batch: TableBatch) -> TableRecord:
        """As Sink.apply, but that rows which the target cannot take are parked; before: where the table stood.

        Raises DeadLetterLimitExceeded when there are more of them than the sink may park.
        """
        sink, relation = self._sink, batch.schema.relation
        if not isinstance(sink, ParkingSink) or batch.frame is not None:
            return sink.apply(batch)
        stands = _stands(sink, before, batch)
        if sink.keeps_history(batch.schema):
            # its batches may be parts of what is published, or come again with what ended rows missing
            stands = max(stands, sink.target_position(batch.schema), self._applied.get(relation, 0))
            waiting = tuple(sink.parked.rows_of(relation))
            batch = replace(batch, rows=rows_behind(batch.rows, stands), parked_keys=waiting)
        record = self._apply(sink, before, batch, stands)
        self._applied[relation] = record.position
        return record

    def _apply(self, sink: ParkingSink, before: TableRecord | None, batch: TableBatch, stands: int) -> TableRecord:
        relation = batch.schema.relation
        limit, held = sink.parking_limits(batch.schema).stop_at, sink.parked.rows_of(relation)
        if stands >= batch.upto:
            return _with_keys(sink.apply(batch), held)
        asked = self._asked(relation)
        if held and before is not None and before.schema != batch.schema.to_json().decode():
            # what did not fit the columns of before may fit those of now
            asked = dict.fromkeys(held, DeadLetterAction.RETRY) | asked
        if not asked and not touches(held, batch):
            sink.parked.write(relation, stands, ())
            try:
                return _with_keys(sink.apply(batch), held)
            except (ValueNotRepresentable, MissingBase) as exc:
                if not limit:
                    exc.fix = _told(exc, sink.name)
                    raise
        left, record = _divided(sink, batch, stands, asked)
        self._note(relation, asked, held, left)
        return _with_keys(record, left)

    def _asked(self, relation: int) -> dict[Key, DeadLetterAction]:
        with self._lock:
            return {key: verb for (of, key), verb in self._due.items() if of == relation}

    def _note(self, relation: int, asked: Mapping[Key, DeadLetterAction], held: Held, left: Held) -> None:
        with self._lock:
            self._relations.add(relation)
            for key, verb in asked.items():
                if self._due.pop((relation, key), None) is not None:
                    self._merged[relation, key] = _became(verb, held.get(key), left.get(key))


def _stands(sink: ParkingSink, before: TableRecord | None, batch: TableBatch) -> int:
    """The position up to which the target has all rows of a table."""
    if before is None:
        return sink.target_position(batch.schema)
    if before.position <= batch.after:
        return before.position
    # a crash left it ahead: perhaps only what a truncate ended is gone from it up to there
    return min(before.position, max(batch.after, sink.target_position(batch.schema)))


@dataclass(frozen=True, slots=True)
class _Turn:
    """A batch of a table with rows that have to wait, or do already."""

    sink: ParkingSink
    batch: TableBatch
    held: Held
    """What is parked and shall not be forgotten."""
    tried: frozenset[Key]
    """Of these the keys to be tried again."""
    stands: int
    limit: int
    """How much may be parked then."""


def _divided(
    sink: ParkingSink, batch: TableBatch, stands: int, asked: Mapping[Key, DeadLetterAction]
) -> tuple[Held, TableRecord]:
    """Park what the target cannot take, and merge the rest: (what is parked then, where the table stands)."""
    relation, allowed = batch.schema.relation, sink.parking_limits(batch.schema)
    held = sink.parked.rows_of(relation)
    kept = {key: row for key, row in held.items() if asked.get(key) is not DeadLetterAction.DISCARD}
    if sink.keeps_history(batch.schema):
        # of a discarded key is tried what came before the refused change, and what comes now
        kept |= {key: forgetting(row) for key, row in held.items() if key not in kept}
    tried = frozenset(key for key in asked if key in kept)
    turn = _Turn(sink, batch, kept, tried, stands, max(allowed.stop_at, _size(held)))
    merged, waiting = (_by_change if sink.keeps_history(batch.schema) else _by_state)(turn)
    if too_many := _too_many(turn, waiting, allowed):
        raise DeadLetterLimitExceeded(f"{too_many} may be parked, for instance: {next(iter(waiting.values())).message}")
    beside = sink.image_mask(batch.schema)
    left = {key: row.with_images(beside) for key, row in waiting.items()}
    sink.parked.write(relation, stands, changed(held, left, batch.upto))
    hit("after_park")
    record = sink.apply(merged)
    sink.parked.confirm(relation, left)
    if new := len(left.keys() - held.keys()):
        log.warning("rows parked", table=batch.schema.topic, keys=new, parked=len(left))
    return left, record


def _by_state(turn: _Turn) -> tuple[TableBatch, Held]:
    """(what a target of latest states can take, what waits then)."""
    offered = offer(turn.held, turn.batch, turn.tried)
    whole = replace(turn.batch, rows=offered.rows)
    refusals = turn.sink.find_refused(whole, turn.limit)
    taken = np.setdiff1d(np.arange(offered.rows.num_rows), [refusal.row for refusal in refusals])
    merged = replace(turn.batch, rows=offered.rows.take(pa.array(taken)))
    return merged, offered.waiting | set_aside(whole, refusals, turn.held, _now())


def _by_change(turn: _Turn) -> tuple[TableBatch, Held]:
    """(what a target of every change can take, what waits then)."""
    batch = replace(turn.batch, endings=tuple(end for end in turn.batch.endings if end.position > turn.stands))
    rows, left = queued(turn.held, batch)
    images, ended = again(left[key] for key in turn.tried)
    refusals = turn.sink.find_refused(replace(batch, rows=rows, unparked=images, earlier_endings=ended), turn.limit)
    fresh = [refusal for refusal in refusals if refusal.row < rows.num_rows]
    still = {tuple(images["key"][r.row - rows.num_rows].as_py()): r.error for r in reversed(refusals[len(fresh) :])}
    taken, ended = again(left.pop(key) for key in turn.tried - still.keys())
    left |= {key: refused_again(left[key], error, batch.upto) for key, error in still.items()}
    goes_on, parked = queue(batch, rows, fresh, _now())
    left |= parked
    tried = taken if taken.num_rows else None
    return replace(turn.batch, rows=goes_on, unparked=tried, earlier_endings=ended, parked_keys=tuple(left)), left


def _too_many(turn: _Turn, waiting: Held, allowed: DeadLetterSettings) -> str:
    """What may not wait, and how much may; nothing if all of it may."""
    topic = turn.batch.schema.topic
    if _size(waiting) > turn.limit:
        return f"{_size(waiting)} rows of table {topic!r} or more have to wait, and {allowed.stop_at}"
    wait, keys = keys_of(turn.batch.rows, waiting)
    if keys >= JUDGED and wait > allowed.ratio * keys:
        changed = f"the {keys} keys that a batch changes of table {topic!r}"
        return f"{wait} of {changed} have to wait, and a share of {allowed.ratio:g}"
    return ""


def _told(exc: CdcError, sink: str) -> str:
    """What to do about a table that stops at a row, for want of parking it."""
    if exc.fix != type(exc).remedy:
        return exc.fix
    mend = "mend the value at the source or give its column the policy 'text', then "
    mend = mend if isinstance(exc, ValueNotRepresentable) else ""
    return f"no row of this table is parked: {mend}run 'cdc replay {sink} --tables TABLE'"


def _size(held: Held) -> int:
    """How many rows that is."""
    return sum(max(1, len(row.changes)) for row in held.values())


def _now() -> int:
    return time.time_ns() // 1_000


def _became(verb: DeadLetterAction, before: ParkedRow | None, after: ParkedRow | None) -> DeadLetterOutcome:
    if before is None:
        return DeadLetterOutcome.GONE
    if after is None:
        return DeadLetterOutcome.DISCARDED if verb is DeadLetterAction.DISCARD else DeadLetterOutcome.APPLIED
    return DeadLetterOutcome.PARKED if after.complete else DeadLetterOutcome.ASKED


def _with_keys(record: TableRecord, held: Held) -> TableRecord:
    return replace(record, parked=tuple(sorted(held))) if held or record.parked else record
