"""Verification of a real source and a written Delta target; a stand-in answers for the apply process."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from tests.pipelines.verification.table_of_every_type import VerifiedPipeline, replaced, typed


def test_a_target_with_the_values_of_every_type_is_equal_to_its_source(pipeline: VerifiedPipeline) -> None:
    verdict = pipeline.verify(typed())
    assert verdict.equal, verdict
    assert (verdict.rows, verdict.target_rows) == (3, 3)
    assert pipeline.released == ["{}"]


@pytest.mark.parametrize(
    ("column", "values"),
    [
        ("words", ["a", None, None]),
        ("words", ["a", "", ""]),
        ("big", [2**63 - 2, 0, None]),
        ("yes", [True, True, None]),
        ("half", [0.1, 0.0, None]),
        ("price", [Decimal("12.51"), Decimal("-0.01"), None]),
        ("free", ["1.1", "NaN", None]),
        ("raw", [b"\x00\xff", None, None]),
    ],
)
def test_one_wrong_value_is_found_and_named(pipeline: VerifiedPipeline, column: str, values: list[object]) -> None:
    verdict = pipeline.verify(replaced(typed(), column, values))
    assert not verdict.equal
    assert [entry["columns"] for entry in verdict.differing] == [[column]]
    assert verdict.counts == {"missing": 0, "extra": 0, "differing": 1}


def test_a_dropped_and_a_duplicated_row_are_named_by_key(pipeline: VerifiedPipeline) -> None:
    rows = typed()
    verdict = pipeline.verify(pa.concat_tables([rows.slice(1), rows.slice(2)]))
    assert verdict.missing == [["1"]]
    assert verdict.extra == [["3"]]


def test_a_table_that_is_not_streaming_is_reported_and_not_equal(pipeline: VerifiedPipeline) -> None:
    pipeline.state = "snapshotting"
    verdict = pipeline.verify(typed())
    assert (verdict.equal, verdict.state, verdict.rows) == (False, "snapshotting", 0)
    assert verdict.reason == "a full copy of the table has not ended"


def test_a_table_that_the_sink_does_not_list_is_reported(pipeline: VerifiedPipeline) -> None:
    with connect(pipeline.dsn) as conn:
        conn.execute("CREATE TABLE public.late (id int PRIMARY KEY)")
    write_deltalake(str(pipeline.target), typed())
    with pipeline.apply():
        states = {verdict.topic: verdict.state for verdict in pipeline.report().tables}
    assert states == {"public.kinds": "streaming", "public.late": "absent"}


def test_a_table_with_a_dot_in_its_name_goes_by_its_topic(pipeline: VerifiedPipeline) -> None:
    with connect(pipeline.dsn) as conn:
        conn.execute('CREATE TABLE public."late.one" (id int PRIMARY KEY)')
    write_deltalake(str(pipeline.target), typed())
    with pipeline.apply():
        (verdict,) = pipeline.report(tables=('public."late.one"',)).tables
    assert (verdict.topic, verdict.state) == ('public."late.one"', "absent")


def test_an_unknown_sink_or_table_is_refused(pipeline: VerifiedPipeline) -> None:
    with pytest.raises(ConfigError, match="unknown sink 'nowhere'"):
        pipeline.report(sinks=("nowhere",))
    with pipeline.apply(), pytest.raises(ConfigError, match="no captured table"):
        pipeline.report(tables=("nothing",))


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_the_catalog_records_comparisons_and_no_counts(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    pipeline.verify(typed().slice(1), mode=VerifyMode.COUNT)
    assert pipeline.catalog.verified.ls("kinds") == []
    shutil.rmtree(pipeline.target)
    pipeline.verify(typed().slice(1), mode=mode)
    (wrong,) = pipeline.catalog.verified.ls("kinds")
    assert (wrong.sink, wrong.topic, wrong.rows, wrong.mismatched, wrong.equal_at) == (
        "lake",
        "public.kinds",
        3,
        1,
        None,
    )
    shutil.rmtree(pipeline.target)
    before = datetime.now(UTC)
    pipeline.verify(typed(), mode=mode)
    (right,) = pipeline.catalog.verified.ls("kinds")
    assert (right.mismatched, right.ended, right.ranges) == (0, True, 1)
    assert right.through is not None
    assert right.equal_at is not None
    assert before <= right.through <= right.equal_at
