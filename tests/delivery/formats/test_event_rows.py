"""Columns of log rows as texts, and the events of changes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.delivery.formats.contract import TOMBSTONE
from cdc.delivery.formats.event_rows import JsonRows, Refusals, assemble, message_columns, position_texts
from cdc.errors import EventNotEncodable
from cdc.position import EPOCH_BITS, LSN_BITS, Position
from tests.delivery.formats.changes import log_row, log_rows

POSITIONS = st.integers(0, (1 << EPOCH_BITS + LSN_BITS) - 1)


def expected(positions: list[int]) -> list[str]:
    return [str(Position(position)) for position in positions]


def test_columns_of_a_transaction_become_texts() -> None:
    rows = JsonRows(log_rows([log_row("c", 3, position=(1 << 52) + 255, committed_at=-1), log_row("s", 4)]))
    assert rows.positions().to_pylist() == ["1:0/FF", "0/16E9058"]
    assert rows.lsns().to_pylist() == ["255", "24023128"]
    assert rows.ordinals(first=1).to_pylist() == ["4", "5"]
    assert rows.event_ids("L").to_pylist() == ["L/1:0/FF/3", "L/0/16E9058/4"]
    assert rows.millis().to_pylist() == ["-1", "1559033904863"]
    assert rows.commit_times().to_pylist() == ["1969-12-31T23:59:59.999999Z", "2019-05-28T08:58:24.863123Z"]
    assert rows.is_change().tolist() == [True, False]


@given(st.lists(POSITIONS))
def test_any_positions_become_texts(positions: list[int]) -> None:
    assert position_texts(np.array(positions, np.int64)).to_pylist() == expected(positions)


@given(POSITIONS, st.lists(st.integers(0, (1 << 20) - 1), min_size=1))
def test_positions_that_are_near_each_other_become_texts(first: int, steps: list[int]) -> None:
    positions = [min(first + step, (1 << EPOCH_BITS + LSN_BITS) - 1) for step in steps]

    assert position_texts(np.array(positions, np.int64)).to_pylist() == expected(positions)


@pytest.mark.parametrize("low", [0, 0xF, 0x10, 0xFFFF, 0x10000, 0xFFFFFFFF])
@pytest.mark.parametrize("high", [0, 0x16 << 32, (1 << LSN_BITS) + (0x16 << 32)])
def test_positions_of_each_number_of_digits_become_texts(high: int, low: int) -> None:
    assert position_texts(np.array([high + low] * 3, np.int64)).to_pylist() == expected([high + low]) * 3


def test_tombstones_follow_their_events_and_refused_changes_have_none() -> None:
    texts = pa.array(["a", "b", "c", "d"])
    refusals = Refusals("shop.orders")
    refusals.add(np.array([False, False, True, False]), "price", "x")
    refusals.add(np.array([False, False, True, False]), "other", "y")
    sent, deleted = np.array([True, True, True, False]), np.array([True, False, True, False])
    events = assemble((texts, texts), sent, refusals.found, headers={1: (("h", b"1"),)}, tombstones=deleted)
    assert events.source.tolist() == [0, 0, 1]
    assert events.suffixes == ["", TOMBSTONE, ""]
    assert events.keys.to_pylist() == ["a", "a", "b"]
    assert events.values.to_pylist() == ["a", None, "b"]
    assert events.headers == [(), (), (("h", b"1"),)]
    assert [str(error) for error in events.refused.values()] == [
        "column 'price' of table shop.orders cannot be sent: x"
    ]
    assert isinstance(events.refused[2], EventNotEncodable)


def test_messages_of_older_logs_have_no_prefix() -> None:
    columns = message_columns(
        JsonRows(log_rows([log_row("m", key=["p", "f", "0/A"], payload=b"x"), log_row("m"), log_row("m", key=["x"])]))
    )
    assert columns.prefixes.to_pylist() == ["p", None, None]
    assert columns.transactional.to_pylist() == ["false", None, None]
    assert columns.lsns.to_pylist() == ["10", "24023128", "24023128"]
    assert columns.contents.to_pylist() == [b"x", b"", b""]
