"""Overload policies: `latest` never loses a column, `drop` counts and reports, and neither sees foreign rows."""

from __future__ import annotations

import json
import time
from pathlib import Path
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cdc.delivery.destinations.contract import DeliveryIdentity
from cdc.delivery.overload import LATEST_BATCHES, OverloadPolicy, Selection
from tests.delivery.destinations.planned import PlannedDestination
from tests.delivery.loop_run import LoopRun, drain, places_of, settings_of
from tests.delivery.sent_log import Row, begin_log, change, fold
from tests.log.rows import message_row, table
from tests.log.sample_log import ITEMS, ORDERS, commit_rows

DROP = {"drop": {"older_than": "10s"}}


def policy(on_overload: Any, **fields: Any) -> OverloadPolicy:
    """A policy."""
    return OverloadPolicy(settings_of(on_overload=on_overload, **fields), DeliveryIdentity("shop", "copy", "LOG"))


def selected(on_overload: Any, *rows: Row, is_behind: bool = True, **fields: Any) -> Selection:
    """What a policy selects."""
    return policy(on_overload, **fields).for_window(is_behind=is_behind)(table(*rows))


def ordinals(selection: Selection) -> list[int]:
    """Ordinals of the rows that are sent."""
    found: list[int] = selection.rows["ordinal"].to_pylist()
    return found


def test_only_latest_reads_more_than_a_batch_at_once():
    assert policy("latest").most(10) == 10 * LATEST_BATCHES
    assert policy("wait").most(10) == policy(DROP).most(10) == 10


def test_wait_sends_everything():
    rows = [change(ORDERS, 20, n, "1") for n in range(3)]

    assert ordinals(selected("wait", *rows)) == [0, 1, 2]


def test_latest_sends_the_newest_change_of_each_key_of_each_table_only_while_behind():
    rows = [change((ORDERS, ITEMS)[n % 2], 20, n, str(n // 2 % 2)) for n in range(12)]

    assert ordinals(selected("latest", *rows)) == [8, 9, 10, 11]
    assert selected("latest", *rows).dropped == 8
    assert ordinals(selected("latest", *rows, is_behind=False)) == list(range(12))


def test_latest_keeps_truncates_messages_and_rows_without_a_key():
    rows = [
        change(ORDERS, 20, 0, "1", key=None),
        change(ORDERS, 20, 1, "1", op="t", key=None, after=None),
        message_row(20, 2),
        change(ORDERS, 20, 3, "1"),
        change(ORDERS, 20, 4, "1"),
    ]

    assert ordinals(selected("latest", *rows)) == [0, 1, 2, 4]


def test_latest_keeps_every_event_of_the_outbox():
    outbox = {"table": "shop.items"}
    rows = [
        change(ITEMS, 20, 0, "1"),
        change(ITEMS, 20, 1, "1", op="d", before=[(1, "1")], after=None),
        change(ORDERS, 20, 2, "1"),
        change(ORDERS, 20, 3, "1"),
    ]

    assert ordinals(selected("latest", *rows, outbox=outbox)) == [0, 1, 3]


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_latest_leads_to_the_same_rows_as_every_change(seed: int):
    random = Random(seed)
    rows: list[Row] = []
    for n in range(random.randint(1, 30)):
        key = str(random.randint(0, 3))
        kind = random.choice(("c", "u", "partial", "d"))
        fields: dict[str, Any] = {"op": "u" if kind == "partial" else kind}
        if kind == "d":
            fields |= {"after": None, "before": [(1, key)]}
        if kind == "partial":
            fields |= {"partial": True, "after": random.choice(([(1, key)], [(1, key), (2, f"p{n}")]))}
        rows.append(change(ORDERS, 20, n, key, **fields))
    every: dict[Any, Any] = {}
    fold(rows, every)

    found: dict[Any, Any] = {}
    fold(selected("latest", *rows).rows.to_pylist(), found)

    assert found == every


def test_latest_keeps_the_row_from_which_a_moved_row_has_its_unsent_columns():
    rows = [
        change(ORDERS, 20, 0, "7"),
        change(ORDERS, 20, 1, "1", after=[(1, "1"), (2, "old")]),
        change(ORDERS, 20, 2, "1", op="u", after=[(1, "1"), (2, "big")]),
        change(ORDERS, 20, 3, "1", op="u", partial=True, after=[(1, "1")]),
        *moved(4, "1", "2", partial=True),
        change(ORDERS, 20, 6, "7", op="u"),
        *moved(7, "2", "3", partial=True),
    ]

    assert ordinals(selected("latest", *rows)) == [2, 3, 4, 5, 6, 7, 8]


def moved(ordinal: int, old: str, new: str, *, partial: bool) -> list[Row]:
    """Both rows of an update that changes a key; partial: without the value of the column that is not sent."""
    after = [(1, new)] if partial else [(1, new), (2, f"m{ordinal}")]
    return [
        change(ORDERS, 20, ordinal, old, op="d", before=[(1, old)], after=None),
        change(ORDERS, 20, ordinal + 1, new, op="u", old_key=[old], partial=partial, after=after),
    ]


class MovingConsumer:
    """A consumer that keeps the last image of a deleted row for the row to which it moved."""

    def __init__(self, rows: list[Row]) -> None:
        self.state: dict[str, dict[int, str | None]] = {}
        self._deleted: dict[str, dict[int, str | None]] = {}
        for one in rows:
            self._apply(one)

    def _apply(self, one: Row) -> None:
        (key,) = one["key"]
        if one["op"] == "d":
            self._deleted[key] = self.state.pop(key, {})
            return
        base: dict[int, str | None] = {}
        if one["partial"]:
            base = self.state.get(key, {}) if one["old_key"] is None else self._deleted[one["old_key"][0]]
        self.state[key] = {**base, **dict(one["after"])}


@settings(max_examples=200, deadline=None)
@given(random=st.randoms(use_true_random=False))
def test_latest_leads_to_the_same_rows_also_where_rows_move_with_unsent_columns(random: Random):
    rows: list[Row] = []
    present: set[str] = set()
    while len(rows) < random.randint(1, 30):
        key, other, partial = str(random.randint(0, 3)), str(random.randint(0, 3)), random.random() < 0.6
        place = len(rows)
        if key not in present:
            rows.append(change(ORDERS, 20, place, key))
            present.add(key)
        elif random.random() < 0.2:
            rows.append(change(ORDERS, 20, place, key, op="d", before=[(1, key)], after=None))
            present.remove(key)
        elif other not in present:
            rows += moved(place, key, other, partial=partial)
            present = present - {key} | {other}
        else:
            after = [(1, key)] if partial else [(1, key), (2, f"u{place}")]
            rows.append(change(ORDERS, 20, place, key, op="u", partial=partial, after=after))

    chosen = selected("latest", *rows).rows.to_pylist()

    assert MovingConsumer(chosen).state == MovingConsumer(table(*rows).to_pylist()).state


def old(one: Row, seconds: float = 60) -> Row:
    """A row with a commit time so long ago."""
    return one | {"committed_at": time.time_ns() // 1000 - int(seconds * 1e6)}


def test_drop_counts_and_reports_what_is_too_old():
    rows = [old(change(ORDERS, 20, 0, "1")), old(change(ORDERS, 30, 2, "1")), old(change(ORDERS, 40, 0, "1"), 0)]

    found = selected(DROP, *rows)

    assert found.rows["position"].to_pylist() == [40]
    assert found.dropped == 2
    assert found.gap is not None
    assert json.loads(found.gap.value or b"") == {
        "dropped": 2, "first": "0/14", "last": "0/1E", "older_than_s": 10.0
    }  # fmt: skip
    assert found.gap.id == "LOG/0/1E/2/gap"
    assert found.gap.topic == "shop.copy.gaps"


def test_drop_keeps_truncates_and_messages():
    rows = [old(change(ORDERS, 20, 0, "1", op="t", key=None, after=None)), old(message_row(20, 1))]

    assert selected(DROP, *rows) == Selection(table(*rows))


def test_equal_rows_are_dropped_alike_each_time():
    select = policy({"drop": {"older_than": "1s"}}).for_window(is_behind=True)
    rows = table(old(change(ORDERS, 20, 0, "1"), 0.99))

    first = select(rows).dropped
    deadline = time.monotonic() + 0.05
    while time.monotonic() < deadline:
        assert select(rows).dropped == first == 0


def test_a_newer_row_for_another_sink_hides_no_change_of_this_delivery(tmp_path: Path):
    root = tmp_path / "log"
    writer = begin_log(root)
    commit_rows(writer, change(ORDERS, 20, 0, "1"), change(ORDERS, 20, 1, "1", op="r", address="lake"))
    commit_rows(writer, change(ORDERS, 30, 0, "2"))
    destination = PlannedDestination()

    with LoopRun(root, destination, on_overload="latest", batch=1) as loop:
        drain(loop)

    assert places_of(destination.delivered) == [(20, 0), (30, 0)]


def test_rows_of_other_tables_are_not_counted_as_dropped(tmp_path: Path):
    root = tmp_path / "log"
    commit_rows(begin_log(root), old(change(ITEMS, 20, 0, "1")), old(change(ORDERS, 20, 1, "1")))
    destination = PlannedDestination()

    with LoopRun(root, destination, on_overload=DROP, tables=["shop.orders"]) as loop:
        drain(loop)

    assert loop.progress.dropped == 1
    assert [event.topic for event in destination.delivered] == ["shop.copy.gaps"]
