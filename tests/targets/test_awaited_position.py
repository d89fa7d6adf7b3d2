"""A position that is waited for: with an epoch, or with the epoch that the sink has."""

from __future__ import annotations

import pytest

from cdc.errors import MalformedLsn
from cdc.lsn import Lsn
from cdc.position import Position
from cdc.targets.awaited_position import AwaitedPosition

SECOND = Position.of(Lsn(0x20), 2)
"""A position in the second epoch."""


@pytest.mark.parametrize(
    ("text", "present", "reached"),
    [
        ("0/20", Position(0x1F), False),
        ("0/20", Position(0x20), True),
        ("0/20", SECOND, True),
        ("0/21", SECOND, False),
        ("1:0/21", SECOND, True),
        ("2:0/21", SECOND, False),
        ("2:0/20", SECOND, True),
        ("2:0/20", Position(0x21), False),
    ],
)
def test_a_position_without_an_epoch_is_of_the_present_one(text: str, present: Position, reached: bool) -> None:
    assert AwaitedPosition.parse(text).is_reached(present) is reached


def test_a_malformed_position_is_refused() -> None:
    with pytest.raises(MalformedLsn):
        AwaitedPosition.parse("noon")
