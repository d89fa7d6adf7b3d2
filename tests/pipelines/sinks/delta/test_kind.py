"""Delta tables as a kind of sink: settings from a definition, and replays into a directory."""

from __future__ import annotations

from typing import Any

import pytest

from cdc.config import DeltaSinkDefinition
from cdc.targets.published_record import TableRecord
from pipelines.sinks.delta.kind import DeltaKind, delta_settings
from pipelines.sinks.delta.settings import Writer
from tests.contracts.folded import ORDERS

MERGED = [{"match": "shop.orders*", "path": "/lake/all", "merge_tables": True}]


def delta(**keys: Any) -> DeltaSinkDefinition:
    """A sink with these keys."""
    return DeltaSinkDefinition.model_validate(
        {"type": "delta", "name": "lake", "path": "/lake/{schema}/{table}", **keys}
    )


def test_settings_are_those_of_the_definition() -> None:
    settings = delta_settings(delta(writer="spark", max_rewrite="1MiB", upkeep={"keep_commits": 70}))

    assert (settings.name, settings.writer, settings.max_rewrite) == ("lake", Writer.SPARK, 1 << 20)
    assert settings.upkeep.keep_commits == 70


@pytest.mark.parametrize(("path", "uri"), [("/new", "/new/shop/orders"), ("/new/{table}", "/new/orders")])
def test_a_replay_into_a_directory_writes_all_targets_below_it(path: str, uri: str) -> None:
    sink = DeltaKind().build_at(delta(rules=MERGED), path)

    assert sink.parts.settings.uri_of(ORDERS) == uri
    sink.close()


@pytest.mark.parametrize(
    ("writer", "has_delta", "can"),
    [("auto", True, True), ("auto", False, False), ("copy-on-write", True, False), ("spark", True, True)],
)
def test_executors_write_delta_tables_unless_their_files_must_be_copied(
    writer: str, has_delta: bool, can: bool
) -> None:
    assert DeltaKind().executors_can_write(delta(writer=writer), lambda: has_delta) is can


def test_a_table_that_shares_a_rebuilt_target_is_named() -> None:
    schema = ORDERS.to_json().decode()
    built = TableRecord(7, "shop.orders", "/lake/all", 10, 0, "streaming", schema=schema)
    before = {
        7: built,
        8: TableRecord(8, "shop.orders_2", "/lake/all", 10, 0, "streaming"),
        9: TableRecord(9, "shop.items", "/lake/shop/items", 10, 0, "streaming"),
    }

    assert DeltaKind().sharing(delta(rules=MERGED), [built], before) == {8: before[8]}
