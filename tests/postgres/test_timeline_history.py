"""The parser of timeline history files."""

from __future__ import annotations

import pytest

from cdc.errors import MalformedFrame
from cdc.lsn import Lsn
from cdc.postgres.timeline_history import TimelineHistory, TimelineSwitch

TWICE = "1\t0/3000160\tno recovery target specified\n\n2\t0/5000028\tbefore 2026-11-27 12:00:00+00\n\n"
"""As a server writes it: the reason of a restore to a time ends with a line break."""


def test_every_promotion_is_a_switch() -> None:
    history = TimelineHistory.parse(TWICE)

    assert history.switches == (
        TimelineSwitch(1, Lsn(0x3000160), "no recovery target specified"),
        TimelineSwitch(2, Lsn(0x5000028), "before 2026-11-27 12:00:00+00"),
    )
    assert [switch.is_restore for switch in history.switches] == [False, True]
    assert history.switch_point == Lsn(0x5000028)


def test_a_timeline_begins_where_the_one_before_was_left() -> None:
    history = TimelineHistory.parse(TWICE)

    assert [history.began(timeline) for timeline in (1, 2, 3)] == [0, 0x3000160, 0x5000028]
    assert history.left(2) == history.switches[1]
    assert history.left(3) is None


def test_a_timeline_that_another_server_took_is_not_in_the_history() -> None:
    history = TimelineHistory.parse("1\t0/3000160\tno recovery target specified\n3\t0/5000028\t\n")

    assert history.left(2) is None
    assert history.left(3) is not None


@pytest.mark.parametrize("text", ["", "\n", "# a comment\n"])
def test_an_empty_history_has_no_switch(text: str) -> None:
    assert TimelineHistory.parse(text) == TimelineHistory()
    assert TimelineHistory().switch_point == 0


@pytest.mark.parametrize("text", ["1", "1\tnonsense", "x\t0/1", "2\t0/1\n1\t0/2\n", "1\t0/1\n1\t0/2\n"])
def test_another_text_is_refused(text: str) -> None:
    with pytest.raises(MalformedFrame, match="timeline"):
        TimelineHistory.parse(text)
