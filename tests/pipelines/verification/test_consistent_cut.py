"""Consistent cuts: a real source, and a stand-in that answers for the apply process."""

from __future__ import annotations

import pytest

from cdc.errors import PositionNotReached
from cdc.postgres.connection import connect
from pipelines.verification.verify import VerifyOptions, verify
from tests.pipelines.verification.table_of_every_type import VerifiedPipeline, typed


def test_a_commit_after_the_snapshot_is_not_compared(own: VerifiedPipeline) -> None:
    own.fill({"lake": typed()})

    def change() -> None:
        with connect(own.dsn) as conn:
            conn.execute("DELETE FROM public.kinds")

    with own.apply(before_answer=change):
        assert own.report().equal


def test_for_a_sink_beyond_the_cut_another_snapshot_is_taken(pipeline: VerifiedPipeline) -> None:
    pipeline.fill({"lake": typed()})
    with pipeline.apply(passed=2):
        assert pipeline.report().equal


def test_without_an_apply_process_there_is_no_cut(pipeline: VerifiedPipeline) -> None:
    with pytest.raises(PositionNotReached, match="has never run"):
        pipeline.report()


def test_a_sink_that_does_not_answer_is_named_after_the_timeout(pipeline: VerifiedPipeline) -> None:
    pipeline.alive()
    with pytest.raises(PositionNotReached, match="'lake'"):
        verify(pipeline.definition, VerifyOptions(timeout=0.2))
    assert not pipeline.catalog.commands.pending("kinds", "cut")
