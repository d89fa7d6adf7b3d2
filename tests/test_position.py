"""Position: epochs and LSNs in one ordered number."""

from __future__ import annotations

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from cdc.errors import MalformedLsn, MalformedPosition
from cdc.position import EPOCH_BITS, LSN_BITS, ChangePosition, Position

epochs = st.integers(0, 2**EPOCH_BITS - 1)
lsns = st.integers(0, 2**LSN_BITS - 1)
places = st.tuples(epochs, lsns)


@given(places)
def test_epoch_and_lsn_come_back(place: tuple[int, int]) -> None:
    epoch, lsn = place
    position = Position.of(lsn, epoch)

    assert (position.epoch, int(position.lsn)) == place


@given(places)
def test_what_is_printed_is_read_back(place: tuple[int, int]) -> None:
    position = Position.of(place[1], place[0])

    assert Position.parse(str(position)) == position


@given(places, places)
def test_a_later_epoch_is_above_every_lsn_of_an_earlier_one(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (Position.of(one[1], one[0]) < Position.of(other[1], other[0])) == (one < other)


@given(places)
def test_a_position_is_a_positive_bigint(place: tuple[int, int]) -> None:
    assert 0 <= Position.of(place[1], place[0]) < 2**63


@given(st.text())
def test_any_text_is_a_position_or_a_config_error_of_ours(text: str) -> None:
    try:
        position = Position.parse(text)
    except (MalformedPosition, MalformedLsn):
        event("malformed")
    else:
        assert Position.parse(str(position)) == position


@pytest.mark.parametrize("text", ["x:1/2", ":1/2", "1:", "٢:1/2", "-1:0/0"])
def test_malformed_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="malformed"):
        Position.parse(text)


@pytest.mark.parametrize(("lsn", "epoch"), [(2**LSN_BITS, 0), (-1, 0), (0, 2**EPOCH_BITS), (0, -1)])
def test_what_does_not_fit_is_refused(lsn: int, epoch: int) -> None:
    with pytest.raises(MalformedPosition):
        Position.of(lsn, epoch)


@pytest.mark.parametrize("number", [-1, 2**63])
def test_numbers_out_of_range_are_refused(number: int) -> None:
    with pytest.raises(MalformedPosition):
        Position(number)


def test_only_an_epoch_above_zero_is_printed() -> None:
    assert str(Position.of(0x16B374D848)) == "16/B374D848"
    assert f"{Position.of(0x16B374D848, 2)}" == "2:16/B374D848"
    assert repr(Position.of(1)) == "Position('0/1')"


@given(st.tuples(lsns, st.integers(0, 2**40)), st.tuples(lsns, st.integers(0, 2**40)))
def test_changes_are_ordered_by_transaction_then_ordinal(one: tuple[int, int], other: tuple[int, int]) -> None:
    assert (ChangePosition(Position(one[0]), one[1]) < ChangePosition(Position(other[0]), other[1])) == (one < other)


def test_a_change_prints_its_ordinal() -> None:
    assert str(ChangePosition(Position(255), 3)) == "0/FF#3"
