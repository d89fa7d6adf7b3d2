"""Settings of a Delta sink: those of its tables by rule, and the paths of its record."""

from __future__ import annotations

from dataclasses import replace

from cdc.config import DeadLetterSettings, SinkRule, TableSettings
from pipelines.sinks.contract import NONE_PARKED
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.types import ColumnPolicies, TypePolicy
from tests.contracts.folded import ID, ORDERS

PATH = "/lake/{schema}/{table}"


def settings_with(table: TableSettings | None = None, **rule: object) -> DeltaSettings:
    """A sink with one rule for the tables of the schema `shop`."""
    rules = (SinkRule.model_validate({"match": "shop.*", **rule}),)
    return DeltaSettings("lake", PATH, table=table or TableSettings(), rules=rules)


def test_a_rule_changes_the_settings_of_its_tables_only() -> None:
    settings = settings_with(mode="append")

    assert settings.keeps_history("shop.orders")
    assert not settings.keeps_history("stock.items")
    assert settings.of("shop.orders") is settings.of("shop.orders")


def test_a_column_may_have_a_policy_of_its_own() -> None:
    settings = settings_with(types="text", columns={"id": "exact"})

    assert settings.types_of("stock.items") is TypePolicy.EXACT
    assert settings.types_of("shop.orders") == ColumnPolicies(TypePolicy.TEXT, (("id", TypePolicy.EXACT),))


def test_the_path_of_a_rule_replaces_that_of_the_sink() -> None:
    assert DeltaSettings("lake", PATH).uri_of(ORDERS) == "/lake/shop/orders"
    assert settings_with(path="/other/{table}").uri_of(ORDERS) == "/other/orders"


def test_no_row_is_parked_without_a_key_or_under_a_transform_in_python() -> None:
    table = TableSettings(dead_letters=DeadLetterSettings(stop_at=7))
    keyless = replace(ORDERS, columns=(replace(ID, key=None),))

    assert DeltaSettings("lake", PATH, table=table).dead_letters_of(ORDERS).stop_at == 7
    assert DeltaSettings("lake", PATH, table=table).dead_letters_of(keyless) == NONE_PARKED
    assert settings_with(table, transform={"python": "module:function"}).dead_letters_of(ORDERS) == NONE_PARKED


def test_the_record_is_next_to_the_targets_unless_it_has_a_path() -> None:
    settings = DeltaSettings("lake", PATH)

    assert (settings.record_uri, settings.parked_uri) == ("/lake/_cdc/published", "/lake/_cdc/parked")
    assert replace(settings, record="/apart/published").parked_uri == "/apart/parked"


def test_the_writer_of_a_definition_is_the_writer_of_the_sink() -> None:
    assert DeltaSettings("lake", PATH, writer="copy-on-write").writer is Writer.COPY_ON_WRITE  # type: ignore[arg-type]
