"""The columns that a target should have by the definition, and the rate limit of reads."""

from __future__ import annotations

import pyarrow as pa
import pytest

from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from pipelines.verification.expected_rows import ReadRateLimit
from tests.pipelines.verification.table_of_every_type import Target, VerifiedPipeline, replaced, typed


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


def test_rows_and_columns_outside_the_publication_are_not_expected(own: VerifiedPipeline) -> None:
    with connect(own.dsn) as conn:
        conn.execute("CREATE PUBLICATION cdc_kinds_pub FOR TABLE public.kinds (id, words) WHERE (id < 3)")
    rows = typed().select(["id", "words", "_position"])
    own.fill({"published": rows.slice(0, 2), "all": rows})
    found = {name: (verdict.equal, verdict.rows, verdict.extra) for name, verdict in own.compare().items()}
    assert found == {"published": (True, 2, []), "all": (False, 2, [["3"]])}


def test_a_rule_is_applied_to_the_expected_columns(pipeline: VerifiedPipeline) -> None:
    rule = "except_column_list: ['yes'], transform: {drop: [doc], rename: {id: nr, big: huge}, mask: {words: redact}}"
    rows = replaced(typed(), "words", ["***", "***", None]).drop_columns(["doc", "yes"])
    rows = rows.rename_columns({"id": "nr", "big": "huge"})
    unmasked, narrow = replaced(rows, "words", ["***", None, None]), rows.drop_columns(["huge"])
    targets = {"right": rows, "unmasked": unmasked, "narrow": narrow}
    pipeline.fill({name: Target(found, rule=rule) for name, found in targets.items()})
    for mode in (VerifyMode.ROWS, VerifyMode.CHECKSUM):
        found = pipeline.compare(mode=mode)
        assert found["right"].equal
        wrong = found["unmasked"]
        assert (wrong.mode, wrong.differing) == ("rows", [{"key": ["2"], "columns": ["words"]}])
        assert found["narrow"].reason == "the target has no columns ['big']"


REFUSED = {
    "where: 'id > 1'": (
        "the rule filters rows by an expression of Spark SQL, and verify does not evaluate expressions"
    ),
    "python: 'os.path:join'": (
        "function 'os.path:join' of the rule can change any column except the key, and verify does not call it"
    ),
    "drop: [nothing]": (
        "drop: table 'public.kinds' has no column 'nothing', or the publication does not send this column"
    ),
}


def test_a_table_that_cannot_be_compared_is_refused_with_the_reason(pipeline: VerifiedPipeline) -> None:
    rules = {f"sink_{number}": rule for number, rule in enumerate(REFUSED)}
    pipeline.fill({name: Target(typed(), rule=f"transform: {{{rule}}}") for name, rule in rules.items()})
    found = {rules[name]: (v.equal, v.compared, v.reason) for name, v in pipeline.compare().items()}
    assert found == {rule: (False, False, reason) for rule, reason in REFUSED.items()}


def test_computed_columns_are_named_as_not_compared(pipeline: VerifiedPipeline) -> None:
    rows = typed().append_column("twice", pa.array([0, 0, 0]))
    pipeline.fill({"lake": Target(rows, rule="transform: {computed: {twice: 'small * 2'}}")})
    verdict = pipeline.compare()["lake"]
    assert (verdict.equal, verdict.reason) == (True, "computed columns are not compared: ['twice']")
