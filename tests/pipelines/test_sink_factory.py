"""Sinks from their definitions, and what a definition means for the apply process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.config import DeltaSinkDefinition, SearchSinkDefinition, load_definition
from pipelines.sink_factory import (
    build_sink,
    delta_settings,
    keeps_history,
    needs_spark,
    rules_need_spark,
    without_throttle,
)
from pipelines.sinks.delta.settings import Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.search.sink import SearchSink


def delta(folder: Path, more: str = "") -> DeltaSinkDefinition:
    """The Delta sink of a definition with these further settings, as YAML flow text."""
    path = folder / "pipeline.yaml"
    path.write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{folder}/log'}}\n"
        f"sinks: [{{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'{more}}}]\n"
    )
    (sink,) = load_definition(path).sinks
    assert isinstance(sink, DeltaSinkDefinition)
    return sink


def test_each_type_of_sink_has_its_class(tmp_path: Path) -> None:
    sink, index = (
        build_sink(delta(tmp_path)),
        build_sink(SearchSinkDefinition(type="search", name="find", path=f"{tmp_path}/find")),
    )
    assert isinstance(sink, DeltaSink)
    assert isinstance(index, SearchSink)
    sink.close()
    index.close()


def test_settings_are_those_of_the_definition(tmp_path: Path) -> None:
    settings = delta_settings(delta(tmp_path, ", writer: spark, max_rewrite: 1MiB, upkeep: {keep_commits: 70}"))
    assert (settings.name, settings.writer, settings.max_rewrite) == ("lake", Writer.SPARK, 1 << 20)
    assert settings.upkeep.keep_commits == 70


def test_only_a_sink_that_spark_writes_needs_spark(tmp_path: Path) -> None:
    assert needs_spark(delta(tmp_path, ", writer: spark"))
    assert not needs_spark(delta(tmp_path))
    assert not needs_spark(SearchSinkDefinition(type="search", name="find", path=f"{tmp_path}/find"))


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        ("writer: spark", True),
        ("transform: {computed: {cents: amount * 100}}", True),
        ("transform: {where: amount > 0}", True),
        ("transform: {drop: [note]}", False),
        ("partition_by: [day]", False),
    ],
)
def test_a_rule_needs_spark_for_expressions_and_for_its_writer(tmp_path: Path, rule: str, needed: bool) -> None:
    sink = delta(tmp_path, f", rules: [{{match: shop.orders, {rule}}}]")
    assert rules_need_spark(sink) is needed
    assert not rules_need_spark(SearchSinkDefinition(type="search", name="find", path=f"{tmp_path}/find"))


def test_without_throttle_nothing_limits_rewrites(tmp_path: Path) -> None:
    assert without_throttle(delta(tmp_path, ", max_rewrite: 1MiB")).max_rewrite == 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "tables"),
    [
        ("", []),
        (", stored_as_scd_type: 2", ["shop.items", "shop.orders"]),
        (", rules: [{match: shop.items, mode: append}]", ["shop.items"]),
        (
            ", mode: append, rules: [{match: shop.items, mode: null, stored_as_scd_type: 2}]",
            ["shop.items", "shop.orders"],
        ),
    ],
)
def test_history_is_kept_of_the_tables_that_settings_and_rules_name(
    tmp_path: Path, settings: str, tables: list[str]
) -> None:
    wanted = keeps_history(delta(tmp_path, settings))
    assert (wanted is None) is (not tables)
    assert [topic for topic in ("shop.items", "shop.orders") if wanted is not None and wanted(topic)] == tables
