"""The columns that a target should have by the definition, and the rate limit of reads."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest

from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.expected_rows import ReadRateLimit
from tests.pipelines.verification.table_of_every_type import VerifiedPipeline, replaced, typed


def test_rows_are_read_no_faster_than_the_limit() -> None:
    pauses: list[float] = []
    now = [100.0]
    limit = ReadRateLimit(10, clock=lambda: now[0], pause=pauses.append)
    for at, rows in ((100.0, 20), (101.0, 5), (110.0, 1)):
        now[0] = at
        limit.wait(rows)
    assert pauses == pytest.approx([2.0, 1.5, 0.1])
    ReadRateLimit(None, pause=pauses.append).wait(10**9)
    assert pauses[3:] == [0.0]


@pytest.mark.parametrize(("rows", "extra"), [(2, []), (3, [["3"]])])
def test_rows_and_columns_outside_the_publication_are_not_expected(
    pipeline: VerifiedPipeline, rows: int, extra: list[list[str]]
) -> None:
    with connect(pipeline.dsn) as conn:
        conn.execute("CREATE PUBLICATION cdc_kinds_pub FOR TABLE public.kinds (id, words) WHERE (id < 3)")
    verdict = pipeline.verify(typed().select(["id", "words", "_position"]).slice(0, rows))
    assert verdict.equal is not bool(extra), verdict
    assert (verdict.rows, verdict.extra) == (2, extra)


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_a_rule_is_applied_to_the_expected_columns(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    pipeline.rule(
        "except_column_list: ['yes'], transform: {drop: [doc], rename: {id: nr, big: huge}, mask: {words: redact}}"
    )
    rows = replaced(typed(), "words", ["***", "***", None]).drop_columns(["doc", "yes"])
    rows = rows.rename_columns({"id": "nr", "big": "huge"})
    assert pipeline.verify(rows, mode=mode).equal
    shutil.rmtree(pipeline.target)
    verdict = pipeline.verify(replaced(rows, "words", ["***", None, None]), mode=mode)
    assert (verdict.mode, verdict.differing) == ("rows", [{"key": ["2"], "columns": ["words"]}])
    shutil.rmtree(pipeline.target)
    assert pipeline.verify(rows.drop_columns(["huge"]), mode=mode).reason == "the target has no columns ['big']"


@pytest.mark.parametrize(
    ("transform", "reason"),
    [
        (
            "where: 'id > 1'",
            "the rule filters rows by an expression of Spark SQL, and verify does not evaluate expressions",
        ),
        (
            "python: 'os.path:join'",
            "function 'os.path:join' of the rule can change any column except the key, and verify does not call it",
        ),
        (
            "drop: [nothing]",
            "drop: table 'public.kinds' has no column 'nothing', or the publication does not send this column",
        ),
    ],
)
def test_a_table_that_cannot_be_compared_is_refused_with_the_reason(
    pipeline: VerifiedPipeline, transform: str, reason: str
) -> None:
    pipeline.rule(f"transform: {{{transform}}}")
    verdict = pipeline.verify(typed())
    assert (verdict.equal, verdict.compared, verdict.reason) == (False, False, reason)


def test_computed_columns_are_named_as_not_compared(pipeline: VerifiedPipeline) -> None:
    pipeline.rule("transform: {computed: {twice: 'small * 2'}}")
    verdict = pipeline.verify(typed().append_column("twice", pa.array([0, 0, 0])))
    assert (verdict.equal, verdict.reason) == (True, "computed columns are not compared: ['twice']")
