"""Current rows of a target: in every history mode, and targets that cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from cdc.verify_and_replay_options import VerifyMode
from pipelines.__main__ import main
from tests.pipelines.shop_pipeline import make_shop
from tests.pipelines.sinks.added_features import add_features
from tests.pipelines.verification.table_of_every_type import Target, VerifiedPipeline, replaced, typed


def history_rows(**columns: list[object]) -> pa.Table:
    """The first row and the third, a deleted one and an older state of the first, with the columns of a mode."""
    rows = typed()
    old, deleted = (
        replaced(rows, "words", ["old", None, None]).slice(0, 1),
        replaced(rows, "id", [4, 5, 6]).slice(0, 1),
    )
    found = pa.concat_tables([rows, old, deleted, deleted])
    for name, values in columns.items():
        found = found.append_column(name, pa.array(values))
    return found


# of what history_rows() gives: three rows of now, one of before, and a row that came and went
HISTORIES = {
    "scd2": {"__END_AT": [None, None, None, 3, 4, 5]},
    "append": {
        "_op": ["u", "r", "c", "c", "c", "d"],
        "_ordinal": [1, 0, 0, 0, 0, 2],
        "_generation": pa.nulls(6, pa.int64()),
    },
}


def test_only_current_rows_of_a_history_are_compared(pipeline: VerifiedPipeline) -> None:
    histories = {keeping: history_rows(**columns) for keeping, columns in HISTORIES.items()}
    marked = history_rows(_deleted=[False] * 6).slice(0, 5).filter(pa.array([True, True, True, False, True]))
    histories["soft_delete"] = marked.set_column(
        marked.num_columns - 1, "_deleted", pa.array([False, False, False, True])
    )
    whole = {f"{keeping}_whole": Target(rows, keeping) for keeping, rows in histories.items()}
    pipeline.fill(whole | {f"{keeping}_lost": Target(rows.slice(1), keeping) for keeping, rows in histories.items()})
    for mode in (VerifyMode.ROWS, VerifyMode.CHECKSUM):
        found = pipeline.compare(mode=mode)
        assert len(found) == 2 * len(histories)
        for name, verdict in found.items():
            assert verdict.equal == (name in whole), verdict
            assert name not in whole or (verdict.rows, verdict.target_rows) == (3, 3), verdict


# (op, position and generation of the last change) → the keys that are missing
ENDS: dict[tuple[str, int, int | None], list[list[str]]] = {
    ("t", 1, None): [["2"], ["3"]],  # at the truncate's place, and not behind it as the first is
    ("g", 9, 1): [],
    ("g", 9, 2): [["1"], ["2"], ["3"]],
}


def test_rows_before_a_truncate_or_a_full_copy_are_not_current(pipeline: VerifiedPipeline) -> None:
    targets = {}
    for number, (op, position, generation) in enumerate(ENDS):
        control = pa.table({"_op": [op], "_position": [position], "_ordinal": [0]})
        control = control.append_column("_generation", pa.array([generation], pa.int64()))
        rows = pa.concat_tables([history_rows(**HISTORIES["append"]), control], promote_options="default")
        targets[f"sink_{number}"] = Target(rows, "append")
    pipeline.fill(targets)
    found = pipeline.compare()
    assert [sorted(found[name].missing) for name in targets] == list(ENDS.values())


def test_a_target_of_an_unknown_mode_is_refused(pipeline: VerifiedPipeline) -> None:
    pipeline.fill({"lake": Target(typed(), "guesses")})
    verdict = pipeline.compare()["lake"]
    assert (verdict.equal, verdict.compared) == (False, False)
    assert verdict.reason == "the target has the unknown history mode 'guesses', so its current rows are unknown"


def test_a_target_with_features_that_delta_rs_does_not_read_is_refused_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = make_shop(tmp_path / "shop")
    pipeline.drive("lake")
    add_features(f"{pipeline.folder}/lake/shop/orders", ["typeWidening"])
    status = main(["verify", "-c", f"{pipeline.folder}/shop.yaml", "--sink", "lake", "--against", "log", "--json"])

    tables = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]["tables"]
    found = {table["topic"]: (table["equal"], table["reason"]) for table in tables}
    assert status == 4
    assert found["shop.items"] == (True, None)
    assert found["shop.orders"] == (
        False,
        "delta-rs cannot read the target: Unsupported table features required: [TypeWidening]",
    )
