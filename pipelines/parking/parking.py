"""Parking: a row that a target cannot take is set aside with its key, and everything else goes on.

Theory. A batch is merged as it is while nothing of its table is parked and nothing fails. Otherwise its rows are laid
over what is parked, those that the target refuses are found, and what is parked then is written beside the sink,
**before** the rest is merged. What was written counts once the target has come to the end of the batch, so a crash
between the two leaves the keys as they were, and the batch comes again.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from threading import Lock

import numpy as np
import pyarrow as pa
import structlog

from cdc.dead_letters import Outcome, Verb
from cdc.errors import MissingBase, TooManyParked, ValueNotRepresentable
from cdc.failpoint import hit
from cdc.stores.parked import Key, ParkedRow
from pipelines.parking.parked import Held, changed, offer, set_aside, touches
from pipelines.sinks.sink import Parks, Sink, TableBatch, TableRecord

Place = tuple[int, Key]
"""Relation and key."""

log = structlog.get_logger("apply")


class Parking:
    """What is parked of one sink's tables; a sink that cannot park is passed through."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._relations: set[int] = set()
        """Of which something is, or was, parked."""
        self._due: dict[Place, Verb] = {}
        self._merged: dict[Place, Outcome] = {}
        self._outcomes: dict[Place, Outcome] = {}
        self._lock = Lock()

    def listed(self, tables: Mapping[int, TableRecord]) -> dict[int, TableRecord]:
        """The tables of a sink that was just opened, with what is parked of them where they stand."""
        if not isinstance(self._sink, Parks):
            return dict(tables)
        held = {relation: self._sink.parked.held(relation) for relation in tables}
        self._relations |= {relation for relation, rows in held.items() if rows}
        return {relation: _with_keys(table, held[relation]) for relation, table in tables.items()}

    @property
    def rows(self) -> list[ParkedRow]:
        """Everything that is parked, oldest change first."""
        if not isinstance(self._sink, Parks):
            return []
        with self._lock:
            relations = sorted(self._relations)
        held = [row for relation in relations for row in self._sink.parked.held(relation).values()]
        return sorted(held, key=lambda row: row.place)

    @property
    def due(self) -> set[int]:
        """Relations of which keys wait to be tried again or let go: the next batch is theirs too."""
        with self._lock:
            return {relation for relation, _ in self._due}

    def ask(self, place: Place, verb: Verb) -> None:
        """Have the next batch do it; `outcome` tells when that is published."""
        with self._lock:
            self._outcomes.pop(place, None)
            self._due[place] = verb

    def outcome(self, place: Place) -> Outcome | None:
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

        Raises TooManyParked when there are more of them than the sink may park.
        """
        sink, relation = self._sink, batch.schema.relation
        if not isinstance(sink, Parks) or batch.frame is not None:
            return sink.apply(batch)
        stands = sink.stands(batch.schema) if before is None else before.position
        limit, held = sink.parks(batch.schema), sink.parked.held(relation)
        if stands >= batch.upto:
            return _with_keys(sink.apply(batch), held)
        asked = self._asked(relation)
        if held and before is not None and before.schema != batch.schema.to_json().decode():
            # what did not fit the columns of before may fit those of now
            asked = dict.fromkeys(held, Verb.RETRY) | asked
        if not asked and not touches(held, batch):
            sink.parked.write(relation, stands, ())
            try:
                return _with_keys(sink.apply(batch), held)
            except (ValueNotRepresentable, MissingBase):
                if not limit:
                    raise
        left, record = _divided(sink, batch, stands, asked)
        self._note(relation, asked, held, left)
        return _with_keys(record, left)

    def _asked(self, relation: int) -> dict[Key, Verb]:
        with self._lock:
            return {key: verb for (of, key), verb in self._due.items() if of == relation}

    def _note(self, relation: int, asked: Mapping[Key, Verb], held: Held, left: Held) -> None:
        with self._lock:
            self._relations.add(relation)
            for key, verb in asked.items():
                if self._due.pop((relation, key), None) is not None:
                    self._merged[relation, key] = _became(verb, held.get(key), left.get(key))


def _divided(sink: Parks, batch: TableBatch, stands: int, asked: Mapping[Key, Verb]) -> tuple[Held, TableRecord]:
    """Park what the target cannot take, and merge the rest: (what is parked then, where the table stands)."""
    relation, limit = batch.schema.relation, sink.parks(batch.schema)
    held = sink.parked.held(relation)
    kept = {key: row for key, row in held.items() if asked.get(key) is not Verb.DISCARD}
    offered = offer(kept, batch, {key for key, verb in asked.items() if verb is Verb.RETRY})
    whole = replace(batch, rows=offered.rows)
    refusals = sink.refused(whole, max(limit, len(held)))
    left = offered.waiting | set_aside(whole, refusals, held, time.time_ns() // 1_000)
    if len(left) > max(limit, len(held)):
        raise TooManyParked(
            f"{len(left)} keys of table {batch.schema.topic!r} or more are refused, and {limit} may be parked, "
            f"for instance: {next(iter(left.values())).message}"
        )
    sink.parked.write(relation, stands, changed(held, left, batch.upto))
    hit("after_park")
    taken = np.setdiff1d(np.arange(offered.rows.num_rows), [refusal.row for refusal in refusals])
    record = sink.apply(replace(batch, rows=offered.rows.take(pa.array(taken))))
    sink.parked.settle(relation, left)
    if new := len(left.keys() - held.keys()):
        log.warning("rows parked", table=batch.schema.topic, keys=new, parked=len(left))
    return left, record


def _became(verb: Verb, before: ParkedRow | None, after: ParkedRow | None) -> Outcome:
    if before is None:
        return Outcome.GONE
    if after is None:
        return Outcome.DISCARDED if verb is Verb.DISCARD else Outcome.APPLIED
    return Outcome.PARKED if after.complete else Outcome.ASKED


def _with_keys(record: TableRecord, held: Held) -> TableRecord:
    return replace(record, parked=tuple(sorted(held))) if held or record.parked else record
