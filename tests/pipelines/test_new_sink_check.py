"""Errors of a new sink are found before it begins: new_sink_check.py, cdc/targets/unwritable_tables.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from cdc.config import load_definition
from cdc.errors import ConfigError, InvalidDefinition
from cdc.log.reader import LogReader
from cdc.targets.unwritable_tables import sink_conflicts, tables_in, tables_of_sinks
from pipelines.new_sink_check import NewSinkCheck, find_unresolved_rules
from tests.fixtures import forked
from tests.pipelines.shop_pipeline import ShopPipeline, make_shop

STRANGE = pa.table({"id": [1, 2], "theirs": ["a", "b"]})


@pytest.fixture(name="shop")
def _shop(tmp_path: Path) -> ShopPipeline:
    return make_shop(tmp_path / "shop")


def ruled(shop: ShopPipeline, *rules: str, more: str = "") -> Path:
    """Its definition with rules for the lake."""
    path = shop.folder / "shop.yaml"
    lake = f"name: lake, path: '{shop.folder}/lake/{{schema}}/{{table}}'"
    path.write_text(path.read_text().replace(lake, f"{lake}{more}, rules: [{', '.join(rules)}]"))
    return path


def no_session() -> Any:
    pytest.fail("Spark was asked for nothing")


def begin(path: Path, *sinks: str) -> None:
    """What the apply process checks once there is a log."""
    definition = load_definition(path)
    begun = NewSinkCheck(definition, path, sinks or {sink.name for sink in definition.sinks})
    begun.check(LogReader(definition.log.root), no_session)


def found(path: Path) -> dict[str, str]:
    with pytest.raises(InvalidDefinition) as told:
        begin(path)
    assert told.value.fix.endswith(f"-c {path}'")
    return {flaw.key: flaw.message for flaw in told.value.issues}


def test_a_sink_is_not_begun_where_something_else_lies_in_a_targets_place(shop: ShopPipeline) -> None:
    path, place = shop.folder / "shop.yaml", f"{shop.folder}/lake/shop/orders"
    begin(path)
    write_deltalake(place, STRANGE)

    told = found(path)
    assert list(told) == ["sinks.0.path"]
    assert f"table 'shop.orders' cannot be written to its target: the Delta table at {place!r}" in told["sinks.0.path"]
    begin(path, "find")


def test_a_sink_that_was_begun_is_not_kept_from_its_other_tables(shop: ShopPipeline) -> None:
    shop.drive("lake", 1_200)
    place = shop.folder / "lake/shop/orders"
    place.rename(shop.folder / "away")
    write_deltalake(str(place), STRANGE)

    begin(shop.folder / "shop.yaml")


def test_targets_that_a_crash_left_before_the_first_publish_are_the_sinks_own(shop: ShopPipeline) -> None:
    shop.drive("lake")
    record = shop.folder / "lake/_cdc"
    record.rename(shop.folder / "record")

    begin(shop.folder / "shop.yaml")


def test_a_routed_table_is_looked_for_where_its_rule_puts_it(shop: ShopPipeline) -> None:
    write_deltalake(f"{shop.folder}/lake/shop/orders", STRANGE)
    files = shop.folder / "all"
    files.mkdir()
    (files / "theirs.csv").write_text("1")
    shared = f"{{match: shop.*, path: '{files}', merge_tables: true}}"

    assert list(found(ruled(shop, shared))) == ["sinks.0.rules.0.path"]


def test_a_file_in_a_targets_place_is_told_as_one(shop: ShopPipeline) -> None:
    (shop.folder / "lake/shop").mkdir(parents=True)
    (shop.folder / "lake/shop/items").write_text("theirs")

    assert "shop/items' is a file: expected a directory" in found(shop.folder / "shop.yaml")["sinks.0.path"]


def test_a_table_that_the_pattern_of_its_rule_does_not_match_is_told(shop: ShopPipeline) -> None:
    path = ruled(shop, "{match: shop.*, pattern: 'shop\\.(?P<kind>o)rders', path: '/x/{kind}/{table}'}")

    assert found(path) == {
        "sinks.0.rules.0.pattern": (
            "table 'shop.items' has no target path: the pattern 'shop\\\\.(?P<kind>o)rders' of its rule does not match "
            "the table, or a group of the pattern is empty"
        )
    }


def test_two_tables_that_would_come_to_one_place_are_told(shop: ShopPipeline) -> None:
    place = f"{shop.folder}/all"
    rules = (
        f"{{match: shop.items, path: '{place}/{{schema}}/{{table}}'}}",
        f"{{match: shop.orders, path: '{place}/shop'}}",
    )

    assert found(ruled(shop, *rules)) == {
        "sinks.0.rules.0.path": (
            f"the target of table 'shop.items' would be '{place}/shop/items', "
            f"which overlaps '{place}/shop', the target of table 'shop.orders'"
        )
    }


def test_columns_that_are_not_there_are_told_by_rule_or_sink(shop: ShopPipeline) -> None:
    rules = (
        "{match: shop.orders, except_column_list: [nope], transform: {mask: {nota: redact}, rename: {id: note}}}",
        "{match: shop.items, partition_by: [nope]}",
    )
    told = found(ruled(shop, *rules, more=", column_list: [note]"))

    assert {key: message for key, message in told.items() if "rules.0" in key} == {
        "sinks.0.rules.0.except_column_list": "table 'shop.orders' has no column 'nope'",
        "sinks.0.rules.0.transform.mask": "table 'shop.orders' has no column 'nota', or the publication does not "
        "send this column",
        "sinks.0.rules.0.transform": "two columns of the target of table 'shop.orders' would have the name 'note'",
    }
    assert told["sinks.0.column_list"] == "column 'id' of table 'shop.items' is part of the key and cannot be excluded"


def test_a_rule_of_a_search_sink_that_does_not_fit_is_told_before_the_index_exists(shop: ShopPipeline) -> None:
    path, find = shop.folder / "shop.yaml", f"path: '{shop.folder}/find'"
    path.write_text(path.read_text().replace(find, f"{find}, rules: [{{match: shop.orders, fields: [nope]}}]"))

    assert found(path) == {"sinks.1.rules.0.fields": "table 'shop.orders' has no column 'nope'"}
    begin(path, "lake")
    shop.drive("find")
    begin(path)


def test_columns_of_the_target_are_told_at_their_key(shop: ShopPipeline) -> None:
    rules = (
        "{match: shop.orders, partition_by: [nope]}",
        "{match: shop.items, transform: {python: 'no.such:function'}}",
    )
    assert found(ruled(shop, *rules)) == {
        "sinks.0.rules.0.partition_by": "the target of table 'shop.orders' has no column 'nope'",
        "sinks.0.rules.1.transform.python": "function 'no.such:function' cannot be imported: No module named 'no'",
    }


WRONG = {
    "computed: {loud: 'upper(nota)'}": (
        "transform.computed.loud",
        "UNRESOLVED_COLUMN.WITH_SUGGESTION `nota` at line 1",
    ),
    "computed: {loud: 'note +'}": ("transform.computed.loud", "PARSE_SYNTAX_ERROR"),
    "where: 'lowr(note) = 1'": ("transform.where", "UNRESOLVED_ROUTINE"),
    "where: 'note'": ("transform.where", "has type string: expected a condition"),
    "computed: {day: 'note'}}, partition_by: [dya], x: {": ("partition_by", "has no column 'dya'"),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_spark_does_not_resolve_is_told_at_its_key(shop: ShopPipeline, spark: Any, said: str) -> None:
    rule = f"{{match: shop.orders, transform: {{{said}}}}}".replace(", x: {}", "")
    definition = load_definition(ruled(shop, rule))
    tables = tables_in(LogReader(definition.log.root))
    (misfit,) = find_unresolved_rules(tables_of_sinks(definition, tables, {"lake"}), lambda: spark)

    key, words = WRONG[said]
    assert misfit.key == ("sinks", 0, "rules", 0, *key.split("."))
    assert words in misfit.error.message
    assert sink_conflicts(definition, tables) == []


@pytest.mark.parametrize(
    "command",
    [("pipelines", "apply", "--once"), pytest.param(("cdc", "run", "--only", "apply"), marks=pytest.mark.slow)],
    ids=["apply", "run"],
)
def test_a_first_start_ends_with_2_before_any_write_and_says_why(shop: ShopPipeline, command: tuple[str, ...]) -> None:
    place = f"{shop.folder}/lake/shop/orders"
    write_deltalake(place, STRANGE)
    ended = forked.run(*command, "-c", shop.folder / "shop.yaml", timeout=240)

    assert ended.status == ConfigError.exit_code, ended.output + ended.errors
    assert (
        f"sinks.0.path: table 'shop.orders' cannot be written to its target: the Delta table at {place!r}"
        in ended.errors
    )
    assert "set another path in the sink or in a rule for the table" in ended.errors
    assert DeltaTable(place).version() == 0
    assert [entry.name for entry in (shop.folder / "lake").iterdir()] == ["shop"]
    assert not (shop.folder / "find").exists()
