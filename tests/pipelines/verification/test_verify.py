"""Verification of a real source and a written Delta target; a stand-in answers for the apply process."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

from cdc.config import Definition
from cdc.errors import ConfigError
from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from tests.pipelines.verification.table_of_every_type import VerifiedPipeline, replaced, typed


def test_a_target_with_the_values_of_every_type_is_equal_to_its_source(pipeline: VerifiedPipeline) -> None:
    verdict = pipeline.verify(typed())
    assert verdict.equal, verdict
    assert (verdict.rows, verdict.target_rows) == (3, 3)
    assert pipeline.released == ["{}"]


WRONG: dict[str, list[object]] = {
    "words": ["a", None, None],
    "empty": ["a", "", ""],
    "big": [2**63 - 2, 0, None],
    "yes": [True, True, None],
    "half": [0.1, 0.0, None],
    "price": [Decimal("12.51"), Decimal("-0.01"), None],
    "free": ["1.1", "NaN", None],
    "raw": [b"\x00\xff", None, None],
}
COLUMN_OF = {name: "words" if name == "empty" else name for name in WRONG}


def test_one_wrong_value_is_found_and_named(pipeline: VerifiedPipeline) -> None:
    pipeline.fill({name: replaced(typed(), COLUMN_OF[name], values) for name, values in WRONG.items()})
    found = pipeline.compare()
    assert not any(verdict.equal for verdict in found.values())
    columns = {name: [entry["columns"] for entry in verdict.differing] for name, verdict in found.items()}
    assert columns == {name: [[column]] for name, column in COLUMN_OF.items()}
    assert all(verdict.counts == {"missing": 0, "extra": 0, "differing": 1} for verdict in found.values())


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


def test_a_table_that_the_sink_does_not_list_is_reported_and_goes_by_its_topic(own: VerifiedPipeline) -> None:
    with connect(own.dsn) as conn:
        conn.execute("CREATE TABLE public.late (id int PRIMARY KEY)")
        conn.execute('CREATE TABLE public."late.one" (id int PRIMARY KEY)')
    own.fill({"lake": typed()})
    with own.apply():
        states = {verdict.topic: verdict.state for verdict in own.report().tables}
        (verdict,) = own.report(tables=('public."late.one"',)).tables
    assert states == {"public.kinds": "streaming", "public.late": "absent", 'public."late.one"': "absent"}
    assert (verdict.topic, verdict.state) == ('public."late.one"', "absent")


def test_a_table_that_the_role_may_not_read_is_reported_and_the_others_are_compared(own: VerifiedPipeline) -> None:
    with connect(own.dsn) as conn:
        conn.execute("CREATE ROLE verifier LOGIN REPLICATION")
        conn.execute("CREATE TABLE public.hidden (id int PRIMARY KEY)")
        conn.execute("GRANT SELECT ON public.kinds TO verifier")
    try:
        own.fill({"lake": typed()})
        own.definition = as_role(own.definition, "verifier")
        with own.apply():
            readable = {verdict.topic: (verdict.equal, verdict.state) for verdict in own.report().tables}
            with connect(own.dsn) as conn:
                conn.execute("REVOKE SELECT ON public.kinds FROM verifier")
            (kinds,) = own.report(tables=("public.kinds",)).tables
    finally:
        with connect(own.dsn) as conn:
            conn.execute("DROP OWNED BY verifier")
            conn.execute("DROP ROLE verifier")

    assert readable == {"public.kinds": (True, "streaming"), "public.hidden": (False, "absent")}
    assert (kinds.compared, "may not read the table" in (kinds.reason or "")) == (False, True)


def as_role(definition: Definition, role: str) -> Definition:
    """Return the definition with another role of the source."""
    source = definition.source
    dsn = make_conninfo(source.dsn.reveal(), user=role)
    return definition.model_copy(update={"source": source.model_copy(update={"dsn": type(source.dsn)(dsn)})})


def test_an_unknown_sink_or_table_is_refused(pipeline: VerifiedPipeline) -> None:
    with pytest.raises(ConfigError, match="unknown sink 'nowhere'"):
        pipeline.report(sinks=("nowhere",))
    with pipeline.apply(), pytest.raises(ConfigError, match="no captured table"):
        pipeline.report(tables=("nothing",))


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_the_catalog_records_comparisons_and_no_counts(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    pipeline.verify(typed().slice(1), mode=VerifyMode.COUNT)
    assert pipeline.catalog.verified.ls("kinds") == []
    pipeline.verify(typed().slice(1), mode=mode)
    (wrong,) = pipeline.catalog.verified.ls("kinds")
    assert (wrong.sink, wrong.topic, wrong.rows, wrong.mismatched, wrong.equal_at) == (
        "lake",
        "public.kinds",
        3,
        1,
        None,
    )
    before = datetime.now(UTC)
    pipeline.verify(typed(), mode=mode)
    (right,) = pipeline.catalog.verified.ls("kinds")
    assert (right.mismatched, right.ended, right.ranges) == (0, True, 1)
    assert right.through is not None
    assert right.equal_at is not None
    assert before <= right.through <= right.equal_at
