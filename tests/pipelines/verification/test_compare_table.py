"""Comparison of one table: what each mode finds, parked keys, and columns that are absent."""

from __future__ import annotations

import shutil

import pyarrow as pa
import pytest

from cdc.postgres.connection import connect
from cdc.verify_and_replay_options import VerifyMode
from tests.pipelines.verification.table_of_every_type import VerifiedPipeline, replaced, typed


def test_a_column_that_is_absent_from_the_target_is_a_mismatch(pipeline: VerifiedPipeline) -> None:
    verdict = pipeline.verify(typed().drop_columns(["doc"]))
    assert not verdict.equal
    assert verdict.reason == "the target has no columns ['doc']"


def spoiled() -> dict[str, pa.Table]:
    """The rows with one thing wrong in each; `order` is not wrong."""
    rows = typed()
    place = rows.schema.get_field_index("small")
    return {
        "order": rows.take([2, 0, 1]),
        "missing": rows.slice(1),
        "extra": pa.concat_tables([rows, replaced(rows.slice(0, 1), "id", [4])]),
        "value": replaced(rows, "big", [1, 0, None]),
        "type": rows.set_column(place, "small", pa.array(["7", "-01", None])),
        "empty": replaced(rows, "words", ["a", None, None]),
        "twice": pa.concat_tables([rows, rows.slice(2)]),
        "swapped": replaced(rows, "words", ["", "a", None]),
        "exchanged": replaced(rows, "id", [1, 2, 4]),
    }


SAME_COUNT = {"value", "type", "empty", "swapped", "exchanged"}


@pytest.mark.parametrize("mode", VerifyMode)
def test_every_mode_finds_the_mismatches_that_it_documents(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    found = {}
    for name, rows in spoiled().items():
        shutil.rmtree(pipeline.target, ignore_errors=True)
        verdict = pipeline.verify(rows, mode=mode)
        assert verdict.compared
        assert verdict.mode == mode
        found[name] = verdict.equal
    unseen = {"order"} | (SAME_COUNT if mode is VerifyMode.COUNT else set())
    assert found == {name: name in unseen for name in spoiled()}


def test_the_server_computes_the_digest_and_no_row_is_named(pipeline: VerifiedPipeline) -> None:
    verdict = pipeline.verify(replaced(typed(), "half", [0.1, 0.0, None]), mode=VerifyMode.CHECKSUM)
    assert (verdict.mode, verdict.equal, verdict.mismatched) == ("checksum", False, 1)
    assert verdict.reason == "the digests differ; run with --mode rows to list the keys"
    with connect(pipeline.dsn) as conn:
        conn.execute("UPDATE public.kinds SET half = 0 WHERE id = 2")
    with pipeline.apply():
        assert pipeline.report(mode=VerifyMode.CHECKSUM).equal


@pytest.mark.parametrize("mode", VerifyMode)
def test_parked_keys_are_counted_and_not_compared(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    pipeline.parked = (("2",), ("9",))
    rows = typed()
    verdict = pipeline.verify(pa.concat_tables([rows.slice(0, 1), rows.slice(2)]), mode=mode)
    assert (verdict.equal, verdict.mode, verdict.parked, verdict.parked_keys) == (True, "rows", 2, [["2"], ["9"]])
    shutil.rmtree(pipeline.target)
    verdict = pipeline.verify(rows.slice(2), mode=mode)
    assert (verdict.missing, verdict.parked) == ([["1"]], 2)


@pytest.mark.parametrize("mode", [VerifyMode.ROWS, VerifyMode.CHECKSUM])
def test_a_list_is_compared_element_by_element(pipeline: VerifiedPipeline, mode: VerifyMode) -> None:
    rows = typed()
    place = rows.schema.get_field_index("tags")
    for tags, equal in (([["a", "b c"], [], None], True), ([["a", "b", "c"], [], None], False)):
        shutil.rmtree(pipeline.target, ignore_errors=True)
        verdict = pipeline.verify(rows.set_column(place, "tags", pa.array(tags, pa.list_(pa.string()))), mode=mode)
        assert (verdict.mode, verdict.equal) == (mode, equal)
