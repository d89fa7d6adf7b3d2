"""Rules that change over a target that is filled: what they hide is not shown before, while or after it follows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import DeltaSinkDefinition, load_definition
from cdc.failpoint import VARIABLE
from cdc.position import Position
from cdc.target_names import published_uri
from cdc.targets.dead_letter_rows import read_parked
from cdc.targets.published_record import TableRecord, TargetState
from pipelines.__main__ import main
from pipelines.dead_letters.requests import to_dead_letter
from pipelines.lake import at as frames_at
from tests.cli.command import Outcome, run
from tests.faults.test_kill_reader import KILLED
from tests.fixtures import forked
from tests.pipelines.shop_pipeline import END, ITEMS, ORDERS, KeptShop, ShopPipeline, change, delta_rows, make_shop

CANARY: Final = "canary 7f3a9c"
LATER: Final = END + 100
MASK: Final = "transform: {mask: {note: redact}}"
RULES: Final = {
    "mask": MASK,
    "drop": "transform: {drop: [note]}",
    "rename": "transform: {rename: {note: words}}",
    "filter": "transform: {where: id < 20}",
    "left out": "except_column_list: [note]",
    "listed": "column_list: [id]",
    "mode": "stored_as_scd_type: 2",
}


def add_the_canary(shop: ShopPipeline) -> None:
    shop.drive("lake")
    shop.append(LATER, [change(LATER, 0, 60, CANARY), change(LATER, 1, 9, "later", of=ITEMS)])
    shop.drive("lake", LATER)
    shop.append(LATER + 1, [change(LATER + 1, 0, 61, "after", of=ITEMS)])
    shop.drive("lake", LATER + 1)


@cache
def with_the_canary() -> KeptShop:
    return KeptShop(add_the_canary)


@pytest.fixture(name="shop")
def _shop() -> ShopPipeline:
    """A lake in which one row of shop.orders has the canary, in its newest cut and in past ones; and no server."""
    return with_the_canary().put()


def under(shop: ShopPipeline, rule: str = "") -> ShopPipeline:
    """The same with a rule for shop.orders in its definition."""
    path = shop.folder / "shop.yaml"
    others = [line for line in path.read_text().splitlines() if "name: lake" not in line]
    rules = f"rules: [{{match: shop.orders, {rule}}}]" if rule else "rules: []"
    lake = f"- {{type: delta, name: lake, path: '{shop.folder}/lake/{{schema}}/{{table}}', {rules}}}"
    path.write_text("\n".join([*others, lake]) + "\n")
    return replace(shop, definition=load_definition(path))


def orders(shop: ShopPipeline) -> TableRecord:
    """What the sink published of the table last."""
    record = shop.lake_of().published()
    assert record is not None
    return record.tables[ORDERS]


def query(capsys: pytest.CaptureFixture[str], shop: ShopPipeline, *options: str, of: str = "shop.orders") -> Outcome:
    return run(capsys, "query", f"select * from {of}", "-c", shop.folder / "shop.yaml", "--json", *options)


def replay_of(shop: ShopPipeline) -> list[str]:
    return ["replay", "lake", "-c", str(shop.folder / "shop.yaml"), "--tables", "shop.orders"]


def replayed(shop: ShopPipeline) -> str:
    """What a replay of the table printed."""
    with redirect_stdout(StringIO()) as printed:
        assert main(replay_of(shop)) == 0
    return " ".join(printed.getvalue().split())


def files_with(folder: Path, text: str) -> list[str]:
    """Files that contain the text: as it stands, or as a value of a Parquet file."""
    found = []
    for file in folder.rglob("*"):
        inside = file.read_bytes() if file.is_file() else b""
        values = str(pq.read_table(file, partitioning=None).to_pylist()) if file.suffix == ".parquet" else ""
        if text in str(file) or text.encode() in inside or text in values:
            found.append(str(file.relative_to(folder)))
    return found


QUICK: Final = ("mask", "filter", "listed", "mode")
"""Rules of four kinds."""


@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([name for name in RULES if name not in QUICK], marks=pytest.mark.slow)]
)
def test_a_rule_that_is_added_stops_its_table_before_any_change_comes_and_it_goes_on_once_the_rule_is_as_it_was(
    shop: ShopPipeline, names: Sequence[str]
) -> None:
    for name in names:
        under(shop, RULES[name]).drive("lake", LATER + 1)
        record = orders(shop)
        assert record.state == TargetState.FAILED, name
        assert (record.reason or "").startswith("CDC-3019 ")
        assert "'cdc replay lake --tables shop.orders'" in (record.reason or "").replace("SINK", "lake")
        assert {t.topic: t.state for t in shop.lake_of().tables()}["shop.items"] == TargetState.STREAMING
        under(shop).drive("lake", LATER + 1)
        assert (orders(shop).state, orders(shop).reason) == (TargetState.STREAMING, None), name
    shop.append(LATER + 50, [change(LATER + 50, 0, 60, "changed")])
    shop.drive("lake", LATER + 50)
    assert {row["note"] for row in shop.lake()["shop.orders"] if row["id"] == 60} == {"changed"}


@pytest.mark.parametrize("rule", [RULES["mask"], RULES["left out"]])
def test_a_query_shows_nothing_that_a_rule_hides_not_even_before_the_sink_has_seen_it(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str], rule: str
) -> None:
    moments = ("published", "latest", str(Position(LATER)))
    assert all(CANARY in query(capsys, shop, "--at", at).output for at in moments)
    under(shop, rule)
    for at in moments:
        refused = query(capsys, shop, "--at", at)
        assert (refused.status, refused.envelope["error"]["code"]) == (1, "CDC-3019"), at
        assert "cdc replay" in refused.envelope["error"]["suggestion"]
        assert CANARY not in refused.output
        assert query(capsys, shop, "--at", at, of="shop.items").status == 0


def test_after_the_replay_no_file_of_the_lake_has_what_the_mask_hides(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    assert files_with(shop.folder / "lake", CANARY)
    masked = under(shop, MASK)
    masked.drive("lake", LATER + 1)
    printed = replayed(masked)
    assert "shop.orders: removed the earlier cuts and " in printed
    assert "the change log still contains the hidden values" in printed
    assert files_with(shop.folder / "lake", CANARY) == []
    masked.drive("lake", LATER + 1)
    assert orders(shop).state == TargetState.STREAMING
    assert {row["note"] for row in shop.lake()["shop.orders"]} <= {"***", None}
    for at in ("published", "latest"):
        shown = query(capsys, masked, "--at", at)
        assert (shown.status, CANARY in shown.output, "***" in shown.output) == (0, False, True)


@pytest.mark.slow
def test_no_name_of_a_folder_or_of_a_removed_file_has_what_the_mask_hides(tmp_path: Path) -> None:
    parted = "partition_by: [note], properties: {delta.enableChangeDataFeed: 'true'}"
    shop = under(make_shop(tmp_path), parted)
    shop.append(LATER, [change(LATER, 0, 60, (canary := "canary7f3a9c"))])
    shop.drive("lake", LATER)
    shop.append(LATER + 1, [change(LATER + 1, 0, 60, "other", op="u")])
    shop.drive("lake", LATER + 1)
    assert files_with(shop.folder / "lake", canary)
    retention = DeltaTable(orders(shop).target).metadata().configuration.get("delta.deletedFileRetentionDuration")
    replayed(under(shop, f"{parted}, {MASK}"))
    assert files_with(shop.folder / "lake", canary) == []
    assert not [path for path in (shop.folder / "lake").rglob("*") if canary in path.name]
    now = DeltaTable(orders(shop).target).metadata().configuration
    assert now["delta.deletedFileRetentionDuration"] == (retention or "interval 7 days")


KEPT: Final = {
    "versions": "stored_as_scd_type: 2",
    "changes": "mode: append",
    "marked": "mode: soft_delete",
    "in one target": "path: '<folder>/lake/all', merge_tables: true",
}


@pytest.mark.parametrize(
    "hides", [MASK, pytest.param(RULES["left out"], marks=pytest.mark.slow)], ids=["mask", "left out"]
)
@pytest.mark.parametrize(
    "kept",
    [
        pytest.param(KEPT[name], id=name, marks=() if name in {"versions", "in one target"} else pytest.mark.slow)
        for name in KEPT
    ],
)
def test_however_a_target_keeps_its_rows_what_a_rule_hides_goes(tmp_path: Path, kept: str, hides: str) -> None:
    rule = kept.replace("<folder>", str(tmp_path))
    shop = under(make_shop(tmp_path), rule)
    shop.append(LATER, [change(LATER, 0, 60, CANARY)])
    shop.drive("lake", LATER)
    shop.append(LATER + 1, [change(LATER + 1, 0, 60, "other", op="u")])
    shop.drive("lake", LATER + 1)
    assert files_with(shop.folder / "lake", CANARY)
    hidden = under(shop, f"{rule}, {hides}")
    hidden.drive("lake", LATER + 1)
    assert (orders(hidden).reason or "").startswith("CDC-3019 ")
    replayed(hidden)
    hidden.append(LATER + 50, [change(LATER + 50, 0, 60, CANARY, op="u")])
    hidden.drive("lake", LATER + 50)
    assert (orders(hidden).state, orders(hidden).reason) == (TargetState.STREAMING, None)
    assert files_with(shop.folder / "lake", CANARY) == []


@pytest.mark.slow
def test_past_cuts_of_a_masked_table_are_refused_and_those_of_others_stay(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = under(shop, MASK)
    replayed(masked)
    past = str(Position(LATER))
    refused = query(capsys, masked, "--at", past)
    assert (refused.status, refused.envelope["error"]["code"]) == (1, "CDC-3020")
    assert query(capsys, masked, "--at", past, of="shop.items").status == 0


@pytest.mark.slow
def test_a_replay_without_a_rule_keeps_the_past_cuts_that_were_masked(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    masked = under(shop, MASK)
    replayed(masked)
    for number in (10, 20):
        masked.append(LATER + number, [change(LATER + number, 0, number, "n")])
        masked.drive("lake", LATER + number)
    clear = under(masked)
    clear.append(LATER + 50, [change(LATER + 50, 0, 62, "last")])
    clear.drive("lake", LATER + 50)
    assert (orders(clear).reason or "").startswith("CDC-3019 ")
    replayed(clear)
    assert CANARY in query(capsys, clear).output
    past = query(capsys, clear, "--at", str(Position(LATER + 10)))
    assert (past.status, CANARY in past.output) == (0, False)


@pytest.mark.parametrize(
    "failpoint",
    [
        "replay_before_publish",
        "delta_erased_file",
        *(pytest.param(point, marks=pytest.mark.slow) for point in ("replay_after_table", "delta_erased_file:3")),
    ],
)
def test_what_a_killed_replay_left_is_shown_to_nobody_and_erased_by_the_sink(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str], failpoint: str
) -> None:
    masked = under(shop, MASK)
    masked.drive("lake", LATER + 1)
    replay = forked.run("pipelines", *replay_of(masked), environment={VARIABLE: failpoint}, timeout=90)
    assert replay.status == KILLED
    for at in ("published", "latest", str(Position(LATER))):
        assert CANARY not in query(capsys, masked, "--at", at).output
    masked.drive("lake", LATER + 1)
    assert [file for file in files_with(shop.folder / "lake", CANARY) if "replay-" not in file] == []
    assert {row["note"] for row in delta_rows(orders(shop).target)} <= {"***", None}
    assert (orders(shop).state, orders(shop).reason) == (TargetState.STREAMING, None)


@pytest.mark.slow
def test_dead_letters_of_before_a_mask_go_with_the_target(shop: ShopPipeline) -> None:
    bad: dict[str, Any] = {"after": [(1, "not a number"), (2, CANARY)]}
    shop.append(LATER + 50, [change(LATER + 50, 0, 8, None, op="u", **bad)])
    shop.drive("lake", LATER + 50)
    assert files_with(shop.folder / "lake/_cdc/parked", CANARY)
    masked = under(shop, MASK)
    replayed(masked)
    assert files_with(shop.folder / "lake", CANARY) == []
    assert orders(shop).parked == (("8",),)
    masked.append(LATER + 60, [change(LATER + 60, 0, 8, "right", op="u")])
    masked.drive("lake", LATER + 60)
    assert orders(shop).parked == ()


def test_a_dead_letter_is_not_shown_before_its_target_follows_the_mask(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    bad: dict[str, Any] = {"after": [(1, "not a number"), (2, CANARY)]}
    shop.append(LATER + 50, [change(LATER + 50, 0, 8, None, op="u", **bad)])
    shop.drive("lake", LATER + 50)
    path, template = shop.folder / "shop.yaml", f"{shop.folder}/lake/{{schema}}/{{table}}"
    record = shop.lake_of().published()
    assert record is not None
    (letter,) = (to_dead_letter("lake", row) for row in read_parked(published_uri(template), record))
    with Catalog.open(shop.definition.catalog.url) as catalog:
        catalog.dead_letters.mirror("shop", "lake", [letter])
    show = ("dlq", "show", letter.id, "-c", path, "--json")
    assert CANARY in run(capsys, *show).output
    under(shop, MASK)
    refused = run(capsys, *show)
    assert (refused.status, refused.envelope["error"]["code"]) == (1, "CDC-3019")
    assert CANARY not in refused.output


@pytest.mark.slow
def test_spark_is_given_no_frame_of_a_table_that_does_not_follow_its_rules(
    shop: ShopPipeline, spark: SparkSession
) -> None:
    (lake, *_) = (sink for sink in under(shop, MASK).definition.sinks if isinstance(sink, DeltaSinkDefinition))
    for moment in ("published", str(Position(LATER))):
        assert set(frames_at(spark, lake.path, moment)) == {"shop.orders", "shop.items"}
        assert set(frames_at(spark, lake, moment)) == {"shop.items"}


@pytest.mark.slow
def test_the_log_of_a_target_that_was_erased_can_be_opened_and_goes_on(shop: ShopPipeline) -> None:
    masked = under(shop, MASK)
    replayed(masked)
    for number in range(60):
        at = LATER + 50 + number
        masked.append(at, [change(at, 0, 100 + number, f"n{number}")])
        masked.drive("lake", at)
    assert len(delta_rows(orders(masked).target)) == len(masked.lake()["shop.orders"]) == 110
    assert DeltaTable(orders(masked).target).version() >= 60


def test_the_doctor_names_every_target_that_does_not_follow_its_rules_and_the_command(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    path = under(shop, RULES["left out"]).folder / "shop.yaml"
    found = run(capsys, "doctor", "-c", path, "--json")
    (said,) = [one for one in found.envelope["result"]["problems"] if one["code"] == "CDC-3019"]
    assert (found.status, said["subject"], said["fatal"]) == (3, "shop.orders", True)
    assert f"cdc replay lake --tables shop.orders -c {path}" in said["message"]
    replayed(shop)
    after = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["problems"]
    assert "CDC-3019" not in {one["code"] for one in after}


def test_the_doctor_names_a_sink_that_shows_what_another_one_masks(
    shop: ShopPipeline, capsys: pytest.CaptureFixture[str]
) -> None:
    path = under(shop, MASK).folder / "shop.yaml"
    problems = run(capsys, "doctor", "-c", path, "--json").envelope["result"]["problems"]
    (said,) = [one for one in problems if one["code"] == "CDC-3021"]
    assert (said["subject"], said["fatal"]) == ("shop.orders", False)
    assert "sink 'find' shows 'note' unmasked, but sink 'lake' masks these columns" in said["message"]
