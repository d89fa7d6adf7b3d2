"""Comparison of one table: what each mode finds, parked keys, and columns that are absent."""

from __future__ import annotations

import pyarrow as pa

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


def test_every_mode_finds_the_mismatches_that_it_documents(pipeline: VerifiedPipeline) -> None:
    pipeline.fill(spoiled())
    for mode in VerifyMode:
        found = pipeline.compare(mode=mode)
        assert all(verdict.compared and verdict.mode == mode for verdict in found.values())
        unseen = {"order"} | (SAME_COUNT if mode is VerifyMode.COUNT else set())
        assert {name: verdict.equal for name, verdict in found.items()} == {n: n in unseen for n in spoiled()}, mode


def test_the_server_computes_the_digest_and_no_row_is_named(own: VerifiedPipeline) -> None:
    verdict = own.verify(replaced(typed(), "half", [0.1, 0.0, None]), mode=VerifyMode.CHECKSUM)
    assert (verdict.mode, verdict.equal, verdict.mismatched) == ("checksum", False, 1)
    assert verdict.reason == "the digests differ; run with --mode rows to list the keys"
    with connect(own.dsn) as conn:
        conn.execute("UPDATE public.kinds SET half = 0 WHERE id = 2")
    assert own.compare(mode=VerifyMode.CHECKSUM)["lake"].equal


def test_parked_keys_are_counted_and_not_compared(pipeline: VerifiedPipeline) -> None:
    pipeline.parked = (("2",), ("9",))
    rows = typed()
    pipeline.fill({"apart": pa.concat_tables([rows.slice(0, 1), rows.slice(2)]), "lost": rows.slice(2)})
    for mode in VerifyMode:
        found = pipeline.compare(mode=mode)
        apart, lost = found["apart"], found["lost"]
        assert (apart.equal, apart.mode, apart.parked, apart.parked_keys) == (True, "rows", 2, [["2"], ["9"]])
        assert (lost.missing, lost.parked) == ([["1"]], 2)


def test_a_list_is_compared_element_by_element(pipeline: VerifiedPipeline) -> None:
    rows = typed()
    place = rows.schema.get_field_index("tags")
    tags = {"same": [["a", "b c"], [], None], "other": [["a", "b", "c"], [], None]}
    kind = pa.list_(pa.string())
    pipeline.fill({name: rows.set_column(place, "tags", pa.array(found, kind)) for name, found in tags.items()})
    for mode in (VerifyMode.ROWS, VerifyMode.CHECKSUM):
        found = {name: (verdict.mode, verdict.equal) for name, verdict in pipeline.compare(mode=mode).items()}
        assert found == {"same": (mode, True), "other": (mode, False)}
