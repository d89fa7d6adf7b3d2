"""Of two queries in a cold session the second starts when the first one's first batch came: pipelines/driver.py."""

from __future__ import annotations

from pipelines.driver import FirstBatchGate


def test_one_begins_and_may_ask_again_and_the_other_waits_for_its_end() -> None:
    warming = FirstBatchGate()

    assert warming.begins("lake")
    assert warming.begins("lake")
    assert not warming.begins("find")
    warming.ends("lake")
    assert warming.begins("find")


def test_who_does_not_have_it_ends_nothing() -> None:
    warming = FirstBatchGate()
    warming.begins("lake")

    warming.ends("find")

    assert not warming.begins("find")
