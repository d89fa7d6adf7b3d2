"""Quarantine: rows that a target refuses are parked with their keys, and all other rows are merged.

Theory. A batch is merged unchanged while no row of its table is parked and no row fails. Otherwise the quarantine
overlays the batch on the parked rows and asks the sink which rows it refuses. It then writes the rows to park to the
sink's dead-letter table, **before** it merges the others. The written rows take effect when the target has reached the
end of the batch. A crash between the two steps leaves the parked keys unchanged, and the batch is applied again.

The rows of a large batch are on the executors. Only those of parked keys and refused rows come to the driver, at most
about `dead_letters.stop_at` of each; of a table with history, all changes of these keys. There they are processed as
the rows of a small batch are.
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
from cdc.targets.dead_letter_rows import Key, ParkedRow
from pipelines.dead_letters.parked_keys import (
    ParkedByKey,
    affects_parked,
    changed_entries,
    count_parked_keys,
    count_refusal,
    overlay_parked,
    park_refused,
    park_refused_keys,
    queue_changes_of_parked,
    replay_queues,
    rows_after,
    without_refused_changes,
)
from pipelines.folding.folded_parts import KEY_SEPARATOR
from pipelines.sinks.contract import ExecutorSink, ParkingSink, Sink, TableBatch, TableRecord

RATIO_MIN_KEYS: Final = 100
"""Minimum number of keys in a batch to which the limit `dead_letters.ratio` applies. In a smaller batch, a few refused
rows would already exceed it.
"""
RowKey = tuple[int, Key]
"""(relation, key) of a row."""

log = structlog.get_logger("apply")


class Quarantine:
    """Applies the batches of one sink, parks the rows that the sink refuses, and processes requests about parked rows.

    A sink that cannot park rows gets its batches unchanged.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        # each check of the methods of a protocol takes 27 µs
        self._parking: ParkingSink | None = sink if isinstance(sink, ParkingSink) else None
        self._relations: set[int] = set()
        """Relations with parked rows, now or earlier."""
        self._requests: dict[RowKey, DeadLetterAction] = {}
        self._unpublished: dict[RowKey, DeadLetterOutcome] = {}
        self._outcomes: dict[RowKey, DeadLetterOutcome] = {}
        self._applied: dict[int, int] = {}
        """Position of each relation's target after its last batch, published or not."""
        self._lock = Lock()

    def with_parked_keys(self, tables: Mapping[int, TableRecord]) -> dict[int, TableRecord]:
        """Return the table records of a sink that was just opened, with the parked keys of each table added."""
        if self._parking is None:
            return dict(tables)
        parked_rows = {relation: self._parking.parked.rows_of(relation) for relation in tables}
        self._relations |= {relation for relation, rows in parked_rows.items() if rows}
        return {relation: _with_keys(table, parked_rows[relation]) for relation, table in tables.items()}

    @property
    def rows(self) -> list[ParkedRow]:
        """All parked rows of the sink, sorted by position and ordinal."""
        if self._parking is None:
            return []
        with self._lock:
            relations = sorted(self._relations)
        parked_rows = [row for relation in relations for row in self._parking.parked.rows_of(relation).values()]
        return sorted(parked_rows, key=lambda row: row.place)

    @property
    def requested_relations(self) -> set[int]:
        """Relations with a request to retry or discard parked rows.

        The apply loop includes these relations in its next batch, even if the batch has no changes of them.
        """
        with self._lock:
            return {relation for relation, _ in self._requests}

    def request(self, key: RowKey, action: DeadLetterAction) -> None:
        """Request that the next batch retries or discards the parked row of this key.

        `outcome` returns the result once that batch is published.
        """
        with self._lock:
            self._outcomes.pop(key, None)
            self._requests[key] = action

    def outcome(self, key: RowKey) -> DeadLetterOutcome | None:
        """Return the outcome of a request; None until the batch that processed it is published."""
        with self._lock:
            return self._outcomes.get(key)

    def confirm_published(self) -> None:
        """Record that the applied batches are published; `outcome` then returns the results of their requests."""
        with self._lock:
            self._outcomes |= self._unpublished
            self._unpublished = {}

    def apply(self, before: TableRecord | None, batch: TableBatch) -> TableRecord:
        """Apply a batch as Sink.apply does, but park the rows that the target refuses; return the table's new record.

        before: the published record of the table; None if it has none. Raises DeadLetterLimitExceeded if more rows of
        the table would be parked than `dead_letters` in the definition allows.
        """
        sink, relation = self._parking, batch.schema.relation
        if sink is None or batch.frame is not None:
            return self._sink.apply(batch)
        applied = _applied_position(sink, before, batch)
        if sink.keeps_history(batch.schema):
            # a batch may be a part of a published range, or be repeated without its truncates and ends of full copies
            applied = max(applied, sink.target_position(batch.schema), self._applied.get(relation, 0))
            waiting = tuple(sink.parked.rows_of(relation))
            batch = replace(_after(batch, applied), parked_keys=waiting)
        record = self._apply(sink, before, batch, applied)
        self._applied[relation] = record.position
        return record

    def _apply(self, sink: ParkingSink, before: TableRecord | None, batch: TableBatch, applied: int) -> TableRecord:
        relation = batch.schema.relation
        limit, parked_rows = sink.parking_limits(batch.schema).stop_at, sink.parked.rows_of(relation)
        if parked_rows:
            with self._lock:
                self._relations.add(relation)  # of a table that was never published, they are first known here
        if applied >= batch.upto:
            return _with_keys(sink.apply(batch), parked_rows)
        batch = _with_rows_of_parked_keys(batch, parked_rows)
        requests = self._requests_of(relation)
        if parked_rows and before is not None and before.schema != batch.schema.to_json().decode():
            # rows that did not fit the old columns may fit the new ones
            requests = dict.fromkeys(parked_rows, DeadLetterAction.RETRY) | requests
        if not requests and not affects_parked(parked_rows, batch):
            sink.parked.write(relation, applied, ())
            try:
                return _with_keys(sink.apply(batch), parked_rows)
            except (ValueNotRepresentable, MissingBase) as exc:
                if not limit:
                    exc.fix = _remedy(exc, sink.name)
                    raise
        left, record = _apply_divided(sink, batch, applied, requests)
        self._record_outcomes(relation, requests, parked_rows, left)
        return _with_keys(record, left)

    def _requests_of(self, relation: int) -> dict[Key, DeadLetterAction]:
        with self._lock:
            return {key: action for (of, key), action in self._requests.items() if of == relation}

    def _record_outcomes(
        self, relation: int, requests: Mapping[Key, DeadLetterAction], parked_rows: ParkedByKey, left: ParkedByKey
    ) -> None:
        with self._lock:
            self._relations.add(relation)
            for key, action in requests.items():
                if self._requests.pop((relation, key), None) is not None:
                    self._unpublished[relation, key] = _outcome(action, parked_rows.get(key), left.get(key))


def _applied_position(sink: ParkingSink, before: TableRecord | None, batch: TableBatch) -> int:
    """Return the position up to which the target has all rows of a table."""
    if before is None:
        return sink.target_position(batch.schema)
    if before.position <= batch.after:
        return before.position
    # a crash left the target ahead: up to there only rows that a truncate removed may be missing
    return min(before.position, max(batch.after, sink.target_position(batch.schema)))


@dataclass(frozen=True, slots=True)
class _DividedBatch:
    """A batch that cannot be merged unchanged: its table has parked rows, or the target refuses some of its rows."""

    sink: ParkingSink
    batch: TableBatch
    parked_rows: ParkedByKey
    """The table's parked rows, without those to discard.

    If the target keeps history, a row to discard stays here, but without its refused change and the later changes.
    """
    tried: frozenset[Key]
    """Keys of `parked_rows` to retry."""
    applied: int
    limit: int
    """Maximum number of rows that may be parked after the batch; with history, each queued change of a row counts."""


def _apply_divided(
    sink: ParkingSink, batch: TableBatch, applied: int, requests: Mapping[Key, DeadLetterAction]
) -> tuple[ParkedByKey, TableRecord]:
    """Park the rows that the target refuses and merge the others; return (parked rows, record of the table)."""
    relation, allowed = batch.schema.relation, sink.parking_limits(batch.schema)
    parked_rows = sink.parked.rows_of(relation)
    batch = _with_refused_rows(sink, batch, max(allowed.stop_at, _size(parked_rows)))
    kept = {key: row for key, row in parked_rows.items() if requests.get(key) is not DeadLetterAction.DISCARD}
    if sink.keeps_history(batch.schema):
        # of a discarded key the changes before the refused one are retried, with those of this batch
        kept |= {key: without_refused_changes(row) for key, row in parked_rows.items() if key not in kept}
    tried = frozenset(key for key in requests if key in kept)
    divided = _DividedBatch(sink, batch, kept, tried, applied, max(allowed.stop_at, _size(parked_rows)))
    merged, waiting = (_divide_history if sink.keeps_history(batch.schema) else _divide_latest_state)(divided)
    if too_many := _too_many(divided, waiting, allowed):
        raise DeadLetterLimitExceeded(
            f"too many rows of table {batch.schema.topic!r} were refused ({too_many}); the first error is: "
            f"{next(iter(waiting.values())).message}"
        )
    image_mask = sink.image_mask(batch.schema)
    left = {key: row.with_images(image_mask) for key, row in waiting.items()}
    sink.parked.write(relation, applied, changed_entries(parked_rows, left, batch.upto))
    hit("after_park")
    record = sink.apply(merged)
    sink.parked.confirm(relation, left)
    if new := len(left.keys() - parked_rows.keys()):
        log.warning(
            "the target refused rows, so they were parked; run 'cdc dlq ls' to see the errors",
            table=batch.schema.topic,
            keys=new,
            parked=len(left),
        )
    return left, record


def _after(batch: TableBatch, applied: int) -> TableBatch:
    """Return the batch with its rows after position `applied`, because earlier batches have applied the others."""
    parts = batch.parts
    if parts is not None and applied > batch.after:
        parts = parts.after(applied)
    return replace(batch, rows=rows_after(batch.rows, applied), parts=parts)


def _with_rows_of_parked_keys(batch: TableBatch, parked_rows: ParkedByKey) -> TableBatch:
    """Return the batch with the rows of parked keys on the driver, if its rows are on the executors."""
    if batch.parts is None or not parked_rows:
        return batch
    rows, parts = batch.parts.split_off(map(KEY_SEPARATOR.join, parked_rows))
    return replace(batch, rows=rows, parts=parts)


def _with_refused_rows(sink: ParkingSink, batch: TableBatch, limit: int) -> TableBatch:
    """Return the batch with the rows that the target refuses on the driver, if its rows are on the executors."""
    if batch.parts is None or not isinstance(sink, ExecutorSink):
        return batch
    refused = sink.find_refused_in_parts(batch, limit)
    if not refused.is_complete:
        errors = [refusal.error for refusal in sink.find_refused(replace(batch, rows=refused.rows, parts=None), 1)]
        raise DeadLetterLimitExceeded(
            f"too many rows of table {batch.schema.topic!r} were refused (more than {limit}, because of "
            f"dead_letters.stop_at); an error is: {errors[0].message if errors else 'none'}"
        )
    rows = refused.rows if batch.rows is None else pa.concat_tables([batch.rows, refused.rows])
    return replace(batch, rows=rows, parts=batch.parts.without(refused.rows))


def _divide_latest_state(divided: _DividedBatch) -> tuple[TableBatch, ParkedByKey]:
    """Divide a batch for a target of latest states; return (rows that the target accepts, rows to park)."""
    offered = overlay_parked(divided.parked_rows, divided.batch, divided.tried)
    whole = replace(divided.batch, rows=offered.rows)
    refusals = divided.sink.find_refused(whole, divided.limit)
    taken = np.setdiff1d(np.arange(offered.rows.num_rows), [refusal.row for refusal in refusals])
    merged = replace(divided.batch, rows=offered.rows.take(pa.array(taken)))
    return merged, offered.waiting | park_refused(whole, refusals, divided.parked_rows, _now())


def _divide_history(divided: _DividedBatch) -> tuple[TableBatch, ParkedByKey]:
    """Divide a batch for a target with history; return (changes that the target accepts, rows to park)."""
    batch = replace(
        divided.batch, endings=tuple(end for end in divided.batch.endings if end.position > divided.applied)
    )
    rows, left = queue_changes_of_parked(divided.parked_rows, batch)
    images, ended = replay_queues(left[key] for key in divided.tried)
    refusals = divided.sink.find_refused(
        replace(batch, rows=rows, unparked=images, earlier_endings=ended), divided.limit
    )
    fresh = [refusal for refusal in refusals if refusal.row < rows.num_rows]
    still = {tuple(images["key"][r.row - rows.num_rows].as_py()): r.error for r in reversed(refusals[len(fresh) :])}
    taken, ended = replay_queues(left.pop(key) for key in divided.tried - still.keys())
    left |= {key: count_refusal(left[key], error, batch.upto) for key, error in still.items()}
    accepted, parked = park_refused_keys(batch, rows, fresh, _now())
    left |= parked
    tried = taken if taken.num_rows else None
    return replace(divided.batch, rows=accepted, unparked=tried, earlier_endings=ended, parked_keys=tuple(left)), left


def _too_many(divided: _DividedBatch, waiting: ParkedByKey, allowed: DeadLetterSettings) -> str:
    """Return the exceeded dead-letter limit as text for the error; an empty text if no limit is exceeded."""
    if _size(waiting) > divided.limit:
        return f"{_size(waiting)} or more rows would be parked, but dead_letters.stop_at is {allowed.stop_at}"
    wait, keys = count_parked_keys(divided.batch.rows, waiting)
    keys += 0 if divided.batch.parts is None else divided.batch.parts.table.keys
    if keys >= RATIO_MIN_KEYS and wait > allowed.ratio * keys:
        return f"{wait} of the {keys} keys of a batch would be parked, but dead_letters.ratio is {allowed.ratio:g}"
    return ""


def _remedy(exc: CdcError, sink: str) -> str:
    """Return the remedy for a table that stopped at a refused row, because its sink parks no rows of the table."""
    if exc.fix != type(exc).remedy:
        return exc.fix
    fix = "correct the value at the source or set the type policy of its column to 'text', then "
    fix = fix if isinstance(exc, ValueNotRepresentable) else ""
    return f"{fix}run 'cdc replay {sink} --tables TABLE'; sink {sink!r} parks no rows of this table"


def _size(parked_rows: ParkedByKey) -> int:
    """Return the number of parked rows; with history, each queued change of a row counts."""
    return sum(max(1, len(row.changes)) for row in parked_rows.values())


def _now() -> int:
    return time.time_ns() // 1_000


def _outcome(action: DeadLetterAction, before: ParkedRow | None, after: ParkedRow | None) -> DeadLetterOutcome:
    if before is None:
        return DeadLetterOutcome.GONE
    if after is None:
        return DeadLetterOutcome.DISCARDED if action is DeadLetterAction.DISCARD else DeadLetterOutcome.APPLIED
    return DeadLetterOutcome.PARKED if after.complete else DeadLetterOutcome.ASKED


def _with_keys(record: TableRecord, parked_rows: ParkedByKey) -> TableRecord:
    return replace(record, parked=tuple(sorted(parked_rows))) if parked_rows or record.parked else record
