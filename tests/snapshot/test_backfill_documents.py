"""Backfill state: documents that survive JSON, progress in shares and seconds, impossible requests, and key lists."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.errors import ConfigError
from cdc.snapshot.backfill_documents import (
    KEYS,
    BackfillAction,
    BackfillRequest,
    BackfillState,
    Blocks,
    TableBackfillState,
    check_request,
    csv_line,
    key_range_text,
    parse_key_range,
    parse_keys,
)
from cdc.table import TableSchema, TableState
from tests.log.rows import schema_of

KEYS_AS_TEXT = [("a", "b"), ("a,b", 'c"d'), ("", "x"), ("line\nbreak", " ")]
ORDERS = ("shop.orders",)


@pytest.mark.parametrize(
    "request_",
    [
        BackfillRequest(ORDERS),
        BackfillRequest(ORDERS, first=("1",), last=("9",), rate=5, sink="lake"),
        BackfillRequest(ORDERS, keys=(("1", "a"), ("2", ""))),
        BackfillRequest(ORDERS, keys=()),
        BackfillRequest(ORDERS, resync=True, epoch=2),
    ],
)
def test_a_request_survives_the_catalog(request_: BackfillRequest) -> None:
    assert BackfillRequest.from_json(json.loads(json.dumps(request_.to_json()))) == request_


def test_progress_survives_the_catalog() -> None:
    table = TableBackfillState("snapshotting", rows=5, blocks=[Blocks(1, 2, 3, 4)], size=9, began=7)
    state = BackfillState("paused", {"shop.orders": table}, "standby 'b' is not connected")
    assert BackfillState.from_json(json.loads(json.dumps(state.to_json()))) == state
    assert BackfillState.from_json(None) == BackfillState()
    assert TableBackfillState.from_json(asdict(TableBackfillState())) == TableBackfillState()


def test_the_share_follows_from_blocks_or_from_the_estimate() -> None:
    by_blocks = TableBackfillState("snapshotting", seconds=6.0, blocks=[Blocks(1, 2, 75, 100)], size=100)
    by_rows = TableBackfillState("snapshotting", rows=25, estimate=100, seconds=1.0)
    assert (by_blocks.share, by_blocks.seconds_left) == (0.75, 2.0)
    assert (by_rows.share, by_rows.seconds_left) == (0.25, 3.0)
    assert TableBackfillState("done").share == 1.0
    assert TableBackfillState().seconds_left is None


def test_each_action_is_a_kind_of_command() -> None:
    assert [action.kind for action in BackfillAction] == ["backfill.pause", "backfill.resume", "backfill.cancel"]


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (BackfillRequest(("shop.none",)), "no table of the log matches 'shop.none'"),
        (BackfillRequest(ORDERS, sink="none"), "the definition has no sink called 'none'"),
        (BackfillRequest(ORDERS, first=("1", "2")), r"has the columns \(id\): got 2 values"),
        (BackfillRequest(ORDERS, keys=()), "the list of keys is empty"),
        (BackfillRequest(ORDERS, keys=(("1",),) * (KEYS + 1)), "one request cannot contain"),
        (BackfillRequest(ORDERS, keys=(("1",),), where="true"), "cannot be combined with a key range"),
        (BackfillRequest(ORDERS, keys=(("1",),), resync=True), "cannot be combined with a key range"),
    ],
)
def test_an_impossible_request_is_refused(request_: BackfillRequest, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        check_request(request_, {7: schema_of(7)}, {"lake": None})
    assert caught.value.fix


@pytest.mark.parametrize(
    ("schema", "resync", "possible"),
    [
        (schema_of(7), False, True),
        (schema_of(7).flagged(TableState.NEEDS_RESYNC, "why"), True, True),
        (schema_of(7).flagged(TableState.NEEDS_RESYNC, "why"), False, False),
        (schema_of(7).flagged(TableState.DROPPED, "why"), True, False),
    ],
)
def test_only_a_resync_reads_a_table_that_is_not_exact(schema: TableSchema, resync: bool, possible: bool) -> None:
    request: dict[str, Any] = {"request": BackfillRequest(ORDERS, resync=resync), "known": {7: schema}, "sinks": {}}
    if possible:
        assert check_request(**request) == [schema]
    else:
        with pytest.raises(ConfigError):
            check_request(**request)


def test_keys_are_parsed_from_the_lines_that_they_are_formatted_to() -> None:
    lines = "".join(f"{csv_line(key)}\n" for key in KEYS_AS_TEXT)
    assert parse_keys(lines.splitlines(keepends=True), "keys.csv") == tuple(KEYS_AS_TEXT)
    with pytest.raises(ConfigError, match=r"malformed key in line 2 of keys\.csv"):
        parse_keys(["a\n", '"b"c\n'], "keys.csv")


BOUNDS = st.none() | st.lists(st.text('ab.,"(){}[] \n\\', max_size=6), min_size=1, max_size=3).map(tuple)


@given(BOUNDS, BOUNDS)
def test_a_key_range_is_written_and_read_with_values_of_any_text(
    first: tuple[str, ...] | None, last: tuple[str, ...] | None
) -> None:
    assert parse_key_range(key_range_text(first, last)) == (first, last)


def test_values_with_commas_and_two_dots_are_quoted_in_a_key_range() -> None:
    assert parse_key_range('"(1,x)",7.."[1..5]"') == (("(1,x)", "7"), ("[1..5]",))
    assert parse_key_range("1.5..2.5") == (("1.5",), ("2.5",))
    for malformed in ("5", '"1..5"', 'a"..5'):
        with pytest.raises(ConfigError):
            parse_key_range(malformed)
