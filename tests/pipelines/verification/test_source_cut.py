"""Consistent cuts: a real source, and a stand-in that answers for the apply process."""

from __future__ import annotations

import pytest
from deltalake import write_deltalake

from cdc.errors import PositionNotReached
from cdc.postgres.connection import connect
from pipelines.verification.verify import VerifyOptions, verify
from tests.pipelines.kinds import Ground, typed


def test_a_commit_after_the_snapshot_is_not_compared(ground: Ground) -> None:
    write_deltalake(str(ground.target), typed())

    def change() -> None:
        with connect(ground.dsn) as conn:
            conn.execute("DELETE FROM public.kinds")

    with ground.apply(before_answer=change):
        assert ground.report().equal


def test_for_a_sink_beyond_the_cut_another_snapshot_is_taken(ground: Ground) -> None:
    write_deltalake(str(ground.target), typed())
    with ground.apply(passed=2):
        assert ground.report().equal


def test_without_an_apply_process_there_is_no_cut(ground: Ground) -> None:
    with pytest.raises(PositionNotReached, match="has never run"):
        ground.report()


def test_a_sink_that_does_not_answer_is_named_after_the_timeout(ground: Ground) -> None:
    ground.alive()
    with pytest.raises(PositionNotReached, match="'lake'"):
        verify(ground.definition, VerifyOptions(timeout=0.2))
    assert not ground.catalog.commands.pending("kinds", "cut")
