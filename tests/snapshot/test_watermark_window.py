"""Placing: what the copying thread is given is what the stream says at that place, not what the log holds by then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import SnapshotInvalidated
from cdc.log_row import LOG_SCHEMA
from cdc.pgoutput.decoder_events import DecodedRows, WatermarkSeen
from cdc.position import Position
from cdc.postgres.visibility import Visibility
from cdc.snapshot.watermark_window import WINDOW_LIMIT, Chunk, PlacedRows, WatermarkWindows
from cdc.table import TableSchema, TableState
from pipelines.folding.fold import fold
from tests.fixtures.examples import examples
from tests.pgoutput.streams import ORDERS
from tests.snapshot.multiset import RELATION, History, Transaction, left_of

RENAMED = replace(ORDERS, name="renamed")
FOLLOWING = RENAMED.following(ORDERS)
"""The renamed table as the version after `ORDERS`: it has the former topic."""


@pytest.fixture(name="windows")
def _windows() -> WatermarkWindows:
    windows = WatermarkWindows()
    windows.start_session(Position(100), {ORDERS.relation: ORDERS})
    return windows


def chunk(schema: TableSchema | None = None) -> Chunk:
    return Chunk(ORDERS.relation, ORDERS.topic, LOG_SCHEMA.empty_table(), schema=schema)


def test_a_window_is_read_by_the_version_that_was_told_though_the_log_does_not_hold_it_yet(
    windows: WatermarkWindows,
) -> None:
    assert windows.open_window("one", ORDERS.relation, 0.0) == ORDERS
    windows.set_schema(RENAMED)
    assert windows.open_window("two", ORDERS.relation, 0.0) == RENAMED


def test_a_version_that_a_chunk_brings_holds_from_its_watermark_on(windows: WatermarkWindows) -> None:
    windows.open_window("one", ORDERS.relation, 0.0)
    windows.set_chunk("one", chunk(RENAMED))
    assert windows.open_window("two", ORDERS.relation, 0.0) == ORDERS
    schema, (row,) = windows.batches_at_watermark(WatermarkSeen(b"one", Position(200), 0, 7, 5))
    assert schema == FOLLOWING
    assert isinstance(row, pa.RecordBatch)
    assert row["op"].to_pylist() == ["s"]
    assert windows.open_window("three", ORDERS.relation, 0.0) == FOLLOWING


@pytest.mark.parametrize("values", [[], ["a"]])
def test_a_chunk_is_read_again_if_another_chunk_brings_a_version_in_its_window(
    windows: WatermarkWindows, values: list[str]
) -> None:
    """A table that is dropped as its copy ends must not be marked as live by the end of the copy."""
    dropped = FOLLOWING.flagged(TableState.DROPPED, "gone")
    for token in ("mark", "copy", "foreign"):
        windows.open_window(token, RELATION if token == "foreign" else ORDERS.relation, 0.0)
    windows.set_chunk("mark", chunk(dropped))
    windows.set_chunk("copy", replace(chunk(None if values else FOLLOWING), rows=read(values)))
    windows.set_chunk("foreign", Chunk(RELATION, "shop.t", read(["b"])))
    marked, _ = windows.batches_at_watermark(WatermarkSeen(b"mark", Position(200), 0, 7, 5))
    assert marked is not None
    assert marked.state is TableState.DROPPED
    assert windows.batches_at_watermark(WatermarkSeen(b"copy", Position(200), 1, 7, 5)) == (None, [])
    assert windows.wait_for_outcome("copy", 0.0).must_read_again
    windows.batches_at_watermark(WatermarkSeen(b"foreign", Position(200), 2, 7, 5))
    assert windows.wait_for_outcome("foreign", 0.0).rows == 1


def test_a_watermark_of_nobody_and_one_of_work_that_ended_mean_nothing(windows: WatermarkWindows) -> None:
    seen = WatermarkSeen(b"one", Position(200), 0, 7, 5)
    assert windows.batches_at_watermark(seen) == (None, [])
    windows.track_xids(on=True)
    windows.open_window("one", ORDERS.relation, 0.0)
    windows.set_chunk("one", chunk(RENAMED))
    windows.track_xids(on=False)
    assert windows.batches_at_watermark(seen) == (None, [])
    with pytest.raises(SnapshotInvalidated):
        windows.wait_for_outcome("one", 0.0)


def test_what_no_copy_waits_for_is_placed_also_when_a_copy_begins_meanwhile(windows: WatermarkWindows) -> None:
    windows.open_window("one", ORDERS.relation, 0.0, outlives_copies=True)
    windows.set_chunk("one", chunk(RENAMED))
    windows.track_xids(on=True)
    assert windows.batches_at_watermark(WatermarkSeen(b"one", Position(200), 0, 7, 5))[0] == FOLLOWING
    assert windows.wait_for_outcome("one", 0.0).position == 200


def test_nothing_can_be_placed_while_nothing_streams(windows: WatermarkWindows) -> None:
    windows.end_session()
    with pytest.raises(SnapshotInvalidated):
        windows.open_window("one", ORDERS.relation, 0.0)


def test_a_relation_that_the_stream_has_not_told_of_has_no_version(windows: WatermarkWindows) -> None:
    assert windows.open_window("one", RELATION, 0.0) is None


STATEMENTS = st.tuples(
    st.sampled_from(["insert", "insert", "insert", "update", "update", "delete", "delete", "truncate"]),
    st.sampled_from("ab"),
    st.integers(0, 9),
)
ALL = Visibility(1000, 1000, frozenset())
NOBODY = Visibility(1, 1, frozenset())


@st.composite
def histories(draw: st.DrawFn) -> History:
    """Transactions that got their xids in one order and committed in another, over rows of two values."""
    scripts = draw(st.lists(st.lists(STATEMENTS, min_size=1, max_size=3), min_size=2, max_size=9))
    history = History()
    for xid, script in zip(draw(st.permutations(range(len(scripts)))), scripts, strict=True):
        history.run(xid, script)
    return history


def log_rows(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, LOG_SCHEMA)


def read(values: list[str]) -> pa.Table:
    """What a copy gives of a table of one column."""
    blank = dict.fromkeys(LOG_SCHEMA.names) | {"position": 0, "xid": 0, "committed_at": 0, "partial": False}
    rows = [
        {**blank, "ordinal": n, "relation": RELATION, "op": "r", "after": [(1, value)]}
        for n, value in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, LOG_SCHEMA)


def batches(transactions: list[Transaction], cuts: set[int]) -> Iterator[DecodedRows]:
    """Their rows as a decoder gives them that ends a batch before any row of those numbers."""
    rows = [row for transaction in transactions for row in transaction.rows]
    ends = {t.rows[-1]["position"]: n for t in transactions for n, row in enumerate(rows) if row is t.rows[-1]}
    bounds = sorted({0, len(rows), *(cut % (len(rows) + 1) for cut in cuts)})
    for first, end in pairwise(bounds):
        complete = [row for row in rows[first:end] if ends[row["position"]] < end]
        last = Position(complete[-1]["position"]) if complete else None
        yield DecodedRows(log_rows(rows[first:end]), len(complete), last, 0, 0)


def whole(rows: pa.Table, visibility: Visibility, **said: Any) -> Chunk:
    return Chunk(RELATION, "shop.t", rows, visibility=visibility, **said)


def placed(windows: WatermarkWindows, position: int, token: str = "one") -> list[dict[str, Any]]:
    _, found = windows.batches_at_watermark(WatermarkSeen(token.encode(), Position(position), 3, 99, 5))
    return [row for batch in found if isinstance(batch, pa.RecordBatch) for row in batch.to_pylist()]


@examples(30)
@given(histories(), st.data())
def test_a_table_without_a_key_begins_anew_as_it_is_at_the_watermark(history: History, data: st.DataObject) -> None:
    """Whatever was received when the window opened, whatever of the rest the snapshot sees, in whatever batches."""
    count = len(history.transactions)
    watermark = data.draw(st.integers(1, count))
    arriving = list(batches(history.transactions[:watermark], data.draw(st.sets(st.integers(0, 30)))))
    opened = data.draw(st.integers(0, len(arriving)))
    windows = WatermarkWindows()
    windows.start_session(Position(0), {})
    for decoded in arriving[:opened]:
        windows.observe(decoded)
    windows.open_window("one", RELATION, 0.0, keyless=True)
    for decoded in arriving[opened:]:
        windows.observe(decoded)
    received = max((int(d.last) // 10 for d in arriving[:opened] if d.last), default=0)
    seen = set(range(received))
    for number in range(received, watermark):
        if history.transactions[number].needs <= seen and data.draw(st.booleans()):
            seen.add(number)
    windows.set_chunk("one", whole(read(history.values(seen)), history.visibility(seen), generation="here"))
    found = placed(windows, watermark * 10 + 5)
    # the target holds what vanished unseen at the source
    log = read(["stray"]).to_pylist() + [row for t in history.transactions[:watermark] for row in t.rows] + found
    of_table = [row for row in log if row["relation"] == RELATION]
    strict_order(found, watermark * 10 + 5)
    assert [dict(image)[1] for image in left_of(of_table)] == history.values(range(watermark))
    later = [row for t in history.transactions[watermark:] for row in t.rows if row["relation"] == RELATION]
    assert [dict(image)[1] for image in left_of(of_table + later)] == history.values(range(count))


def strict_order(found: list[dict[str, Any]], position: int) -> None:
    assert [(row["position"], row["ordinal"]) for row in found] == [(position, 3 + n) for n in range(len(found))]


def transaction(number: int, op: str, **images: Any) -> Transaction:
    """One of one row, as the stream tells it."""
    made = Transaction(200 + 10 * number, number)
    made.tell(op, **images)
    return made


def window(windows: WatermarkWindows, *transactions: Transaction, keep: bool = True) -> None:
    """What came while the chunk was read."""
    windows.open_window("one", RELATION, 0.0, keyless=keep)
    for decoded in batches(list(transactions), set()):
        windows.observe(decoded)


def test_what_a_snapshot_saw_is_not_told_again_and_what_it_did_not_see_keeps_its_images(
    windows: WatermarkWindows,
) -> None:
    seen, unseen = transaction(1, "c", after=[(1, "a")]), transaction(2, "u", before=[(1, "a")], after=[(1, "b")])
    window(windows, seen, unseen)
    windows.set_chunk("one", whole(read(["a"]), Visibility(2, 3, frozenset({2}))))
    clear, row, again = placed(windows, 900)
    assert (clear["op"], clear["payload"], row["op"], row["after"]) == ("t", None, "r", [(1, "a")])
    found = {name: again[name] for name in LOG_SCHEMA.names}
    place = {"position": 900, "ordinal": 5, "xid": 99, "committed_at": again["committed_at"]}
    assert found == {**unseen.rows[0], **place}
    assert windows.wait_for_outcome("one", 0.0) == PlacedRows(Position(900), 1)


@pytest.mark.parametrize("visibility", [None, NOBODY])
def test_a_version_comes_first_then_the_rows_then_the_end_of_the_copy(
    windows: WatermarkWindows, visibility: Visibility | None
) -> None:
    window(windows, transaction(1, "c", after=[(1, "b")]))
    rows = read(["a"])
    chunk = Chunk(RELATION, "shop.t", rows, ORDERS, Position(7), "lake", visibility)
    windows.set_chunk("one", chunk)
    found = placed(windows, 900)
    strict_order(found, 900)
    expected = ["s", "r", "g"] if visibility is None else ["s", "t", "r", "c", "g"]
    assert [row["op"] for row in found] == expected
    # the stream is read by that version for everyone; what one sink begins anew, no other may lose
    assert [row["address"] for row in found] == [None] + ["lake"] * (len(found) - 1)
    assert (found[0]["payload"], found[-1]["payload"]) == (ORDERS.to_json(), b"7")
    assert windows.open_window("two", RELATION, 0.0) == ORDERS


@pytest.mark.parametrize(("visibility", "began"), [(None, b"101"), (ALL, b"900")])
def test_a_chunk_that_is_the_whole_copy_names_where_that_began(
    windows: WatermarkWindows, visibility: Visibility | None, began: bytes
) -> None:
    """What the window brought of a keyed table instead of the chunk's rows is no older than that."""
    window(windows)
    windows.set_chunk("one", Chunk(RELATION, "shop.t", read(["a"]), generation="here", visibility=visibility))
    assert placed(windows, 900)[-1]["payload"] == began


def test_a_sink_that_it_is_not_for_keeps_what_it_has(windows: WatermarkWindows) -> None:
    before, since = transaction(1, "c", after=[(1, "a")]), transaction(2, "c", after=[(1, "b")])
    window(windows, before, since)
    windows.set_chunk("one", whole(read(["z"]), NOBODY, address="lake", generation="here"))
    found = placed(windows, 900)
    rows = pa.Table.from_pylist([*before.rows, *since.rows, *found], LOG_SCHEMA)
    assert images(fold(rows, sink="other")) == ["a", "b"]
    assert images(fold(rows, sink="lake")) == ["a", "b", "z"]


def images(folded: pa.Table) -> list[str]:
    return sorted(dict(row["after"])[1] for row in folded.to_pylist() if row["op"] == "u")


@pytest.mark.parametrize("values", [[], ["a"]])
@pytest.mark.parametrize(("visibility", "schema"), [(ALL, None), (ALL, ORDERS), (None, ORDERS)])
def test_what_the_stream_says_of_a_schema_is_newer_than_what_a_chunk_brings(
    windows: WatermarkWindows, values: list[str], visibility: Visibility | None, schema: TableSchema | None
) -> None:
    window(windows, transaction(1, "s", payload=b"{}"))
    windows.set_chunk("one", Chunk(RELATION, "shop.t", read(values), schema, "here", visibility=visibility))
    assert placed(windows, 900) == []
    assert windows.wait_for_outcome("one", 0.0) == PlacedRows(Position(900), 0, must_read_again=True)
    assert windows.open_window("two", RELATION, 0.0) is None


def test_the_end_of_a_copy_stands_whatever_the_schema_became(windows: WatermarkWindows) -> None:
    window(windows, transaction(1, "s", payload=b"{}"), keep=False)
    windows.set_chunk("one", Chunk(RELATION, "shop.t", read([]), generation=Position(7)))
    assert [row["op"] for row in placed(windows, 900)] == ["g"]
    assert not windows.wait_for_outcome("one", 0.0).must_read_again


def test_a_window_that_took_in_too_much_makes_a_whole_table_worthless(windows: WatermarkWindows) -> None:
    window(windows, transaction(1, "c", after=[(1, "x" * WINDOW_LIMIT)]))
    windows.set_chunk("one", whole(read([]), NOBODY))
    assert placed(windows, 900) == []
    assert windows.wait_for_outcome("one", 0.0).must_read_again


def test_a_table_is_not_begun_anew_from_a_window_that_kept_too_little(windows: WatermarkWindows) -> None:
    window(windows, keep=False)
    with pytest.raises(ValueError, match=r"'shop\.t' has no key, but its window"):
        windows.set_chunk("one", whole(read([]), ALL))
