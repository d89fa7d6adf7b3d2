"""Verify with a target that delta-rs opens and does not read: it is not compared, which is said, and the others are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.__main__ import main
from tests.pipelines.replayed import made
from tests.pipelines.sinks.asked import ask


def test_a_target_with_features_that_delta_rs_does_not_read_is_refused_and_the_others_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ground = made(tmp_path / "shop")
    ground.drive("lake")
    ask(f"{ground.folder}/lake/shop/orders", ["typeWidening"])
    status = main(["verify", "-c", f"{ground.folder}/shop.yaml", "--sink", "lake", "--against", "log", "--json"])

    tables = json.loads(capsys.readouterr().out.splitlines()[-1])["result"]["tables"]
    found = {table["topic"]: (table["equal"], table["reason"]) for table in tables}
    assert status == 4
    assert found["shop.items"] == (True, None)
    assert found["shop.orders"] == (
        False,
        "delta-rs does not read the target: Unsupported table features required: [TypeWidening]",
    )
