"""The report of a dry run: rows, bytes and estimated seconds, without a change."""

from __future__ import annotations

import json
from typing import Any

from pipelines.__main__ import main
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from tests.pipelines.shop_pipeline import END, applied_shop, change


def test_a_dry_run_prints_rows_and_bytes_and_touches_nothing(capsys: Any) -> None:
    shop = applied_shop()
    before = sorted(shop.folder.rglob("*"))
    config = str(shop.folder / "shop.yaml")
    assert main(["replay", "lake", "--dry-run", "--json", "-c", config]) == 0
    result = json.loads(capsys.readouterr().out)["result"]
    assert {table["topic"]: table["rows"] for table in result["tables"]} == {"shop.orders": 57, "shop.items": 23}
    assert all(table["bytes"] > 0 and table["state"] == "planned" for table in result["tables"])
    assert sorted(shop.folder.rglob("*")) == before


def test_a_dry_run_expects_more_time_of_more_rows() -> None:
    shop = applied_shop()

    def expected(sink: str) -> tuple[float, dict[str, float]]:
        plan = replay(shop.definition, ReplayOptions(sink=sink, dry_run=True))
        return plan.seconds, {table.topic: table.seconds for table in plan.tables}

    shop.drive("find")
    few, few_of = expected("lake")
    assert 0 < few_of["shop.items"] < few_of["shop.orders"] < few
    assert few < expected("find")[0]  # an index takes longer over the same rows
    shop.append(END + 100, [change(END + 100, n, 200 + n, "more") for n in range(500)])
    more, more_of = expected("lake")
    assert few < more
    assert few_of["shop.orders"] < more_of["shop.orders"]
    assert few_of["shop.items"] == more_of["shop.items"]
