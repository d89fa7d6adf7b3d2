"""The gate through which the first batches of streaming queries go one after the other."""

from __future__ import annotations

from pipelines.sink_parts import FirstBatchGate


def test_an_owner_may_enter_twice_and_the_other_waits_until_it_leaves() -> None:
    gate = FirstBatchGate()

    assert gate.enter("lake")
    assert gate.enter("lake")
    assert not gate.enter("find")
    gate.leave("lake")
    assert gate.enter("find")


def test_leaving_frees_the_gate_only_for_its_owner() -> None:
    gate = FirstBatchGate()
    gate.enter("lake")

    gate.leave("find")

    assert not gate.enter("find")
