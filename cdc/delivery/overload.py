"""Overload policy: which changes a delivery leaves out while it is behind. Without a policy it leaves out none."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config.deliveries import DeliverySettings, Drop, Overload
from cdc.delivery.destinations.contract import ID_HEADER, POSITION_HEADER, DeliveryIdentity, Event
from cdc.log_row import LOG_SCHEMA, ROW_OPERATIONS, Operation
from cdc.position import Position

LATEST_BATCHES: Final = 10
"""Number of batches among which the policy `latest` looks for the newest change of a key."""
_DELETE: Final = Operation.DELETE.value
_ROWS: Final = pa.array(sorted(one.value for one in ROW_OPERATIONS))


class Selection(NamedTuple):
    """The rows that are sent, and what was left out."""

    rows: pa.Table
    dropped: int = 0
    gap: Event | None = None
    """Event that reports the dropped changes; None if there are none."""


NO_ROWS: Final = Selection(LOG_SCHEMA.empty_table())


class OverloadPolicy:
    """The policy of one delivery."""

    def __init__(self, settings: DeliverySettings, identity: DeliveryIdentity) -> None:
        self._policy, self._identity = settings.on_overload, identity
        self._outbox = None if settings.outbox is None else settings.outbox.table

    def most(self, batch: int) -> int:
        """Return the maximum number of rows of a window."""
        return batch * LATEST_BATCHES if self._policy is Overload.LATEST else batch

    def for_window(self, *, is_behind: bool) -> Callable[[pa.Table], Selection]:
        """Return a function that selects the rows of a window that are sent; equal rows always have equal results.

        is_behind: the log has changes after the window.
        """
        if self._policy is Overload.LATEST and is_behind:
            return partial(_newest, outbox=self._outbox)
        if isinstance(self._policy, Drop):
            seconds = self._policy.drop.older_than
            return partial(self._recent, seconds=seconds, oldest=time.time_ns() // 1000 - int(seconds * 1_000_000))
        return Selection

    def _recent(self, rows: pa.Table, *, seconds: float, oldest: int) -> Selection:
        is_kept = pc.greater_equal(rows["committed_at"].cast(pa.int64()), oldest)
        is_kept = pc.or_(is_kept, pc.invert(pc.is_in(rows["op"], _ROWS)))
        dropped = rows.filter(pc.invert(is_kept))
        if not dropped.num_rows:
            return Selection(rows)
        first, last = (Position(dropped["position"][place].as_py()) for place in (0, dropped.num_rows - 1))
        identity = f"{self._identity.log_id}/{last!s}/{dropped['ordinal'][dropped.num_rows - 1].as_py()}/gap"
        content = {"dropped": dropped.num_rows, "first": str(first), "last": str(last), "older_than_s": seconds}
        gap = Event(
            id=identity,
            position=int(last),
            ordinal=dropped["ordinal"][dropped.num_rows - 1].as_py(),
            topic=f"{self._identity}.gaps",
            key=None,
            value=json.dumps(content).encode(),
            headers=((ID_HEADER, identity.encode()), (POSITION_HEADER, str(last).encode())),
        )
        return Selection(rows.filter(is_kept), dropped.num_rows, gap)


def _newest(rows: pa.Table, outbox: str | None) -> Selection:
    """Select the newest change of each key, with the older changes that have columns which were not sent with it.
    Rows of the outbox are events of their own, so all are selected.
    """
    place = pa.array(range(rows.num_rows), pa.int64())
    table = rows.select(["relation", "key", "old_key", "op", "partial"]).append_column("place", place)
    is_row = pc.and_(pc.is_in(rows["op"], _ROWS), pc.is_valid(rows["key"]))
    if outbox is not None:
        is_row = pc.and_(is_row, pc.fill_null(pc.not_equal(rows["topic"], outbox), fill_value=False))
    keyed = table.filter(is_row)
    if not keyed.num_rows:
        return Selection(rows)
    keyed = keyed.append_column("text", _text(keyed["key"]))
    if pc.any(keyed["partial"]).as_py():
        chosen = _newest_and_bases(keyed)
    else:
        chosen = keyed.group_by(["relation", "text"]).aggregate([("place", "max")])["place_max"].combine_chunks()
    others = table.filter(pc.invert(is_row))["place"]
    kept = pc.is_in(place, pa.concat_arrays([chosen, *others.chunks]))
    selected = rows.filter(kept)
    return Selection(selected, rows.num_rows - selected.num_rows)


def _newest_and_bases(keyed: pa.Table) -> pa.Array:
    """Return the places of the newest change of each key, and of the older ones that complete it: back to the last
    complete image of the row, also under an earlier key.
    """
    chosen: list[int] = []
    seen: set[tuple[int, str]] = set()
    incomplete: set[tuple[int, str]] = set()
    old_texts = _text(keyed["old_key"])
    columns = (keyed["relation"], keyed["text"], old_texts, keyed["partial"], keyed["op"], keyed["place"])
    for relation, text, old_text, is_partial, op, place in zip(
        *(column.to_pylist()[::-1] for column in columns), strict=True
    ):
        key = relation, text
        if key in seen and key not in incomplete:
            continue
        chosen.append(place)
        seen.add(key)
        if is_partial:
            incomplete.add(key)
        elif op != _DELETE:
            # the delete of a row that moved comes after its last image, and has no column of it
            incomplete.discard(key)
        if is_partial and old_text is not None:
            # its unsent columns are those of the row under its earlier key
            incomplete.discard(key)
            incomplete.add((relation, old_text))
    return pa.array(chosen, pa.int64())


def _text(keys: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return each key as one text; null for a change without this key."""
    return pc.binary_join(keys.cast(pa.list_(pa.string())), "\0")
