"""Names in a definition that no table has: each is a warning with the closest name."""

from __future__ import annotations

from pathlib import Path

from cdc.capture.unmatched_names import unmatched_name_problems
from cdc.config import check_definition, load_definition
from tests.config.definitions import SOUND, write
from tests.log.rows import schema_of

MISTYPED = """exclude: [shop.v_*]
sinks:
- name: lake
  type: delta
  path: ./lake/{schema}/{table}
  rules:
  - {match: shop.order, transform: {mask: {item: redact}}}
  - {match: shop.o*, dropped_columns: drop}
  - {match: shop.orders, transform: {mask: {item: redact}}}
views:
- {name: shop.v_items, key: [item], sql: "SELECT item, count(*) AS n FROM shop.ordres GROUP BY item"}
"""


def test_a_name_that_no_table_has_is_a_warning_with_the_closest_one(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, _with(MISTYPED)))
    found = {problem.subject: problem for problem in unmatched_name_problems(definition, [schema_of(1, "item")])}
    assert not any(problem.fatal for problem in found.values())
    assert (
        "'shop.ordres', which the source does not have: did you mean 'shop.orders'?"
        in found["view shop.v_items"].message
    )
    rules = [p.message for p in unmatched_name_problems(definition, [schema_of(1, "item")]) if p.subject == "lake"]
    assert [message.partition(" is the first")[0] for message in rules] == [
        "the rule 'shop.order'",
        "the rule 'shop.orders'",
    ]
    assert rules[0].endswith("did you mean 'shop.orders'?")


def test_validate_warns_of_rules_without_effect_and_refuses_views_of_uncaptured_tables(tmp_path: Path) -> None:
    advice = [issue for issue in check_definition(write(tmp_path, _with(MISTYPED))).issues if not issue.fatal]
    assert ["the rule 'shop.o*' before it matches this table" in issue.message for issue in advice] == [True]
    named = _with(MISTYPED).replace("match: shop.*", "match: shop.orders")
    messages = {issue.message: issue.fatal for issue in check_definition(write(tmp_path, named)).issues}
    (fatal,) = (message for message, is_fatal in messages.items() if is_fatal)
    assert "no rule of 'tables' captures this table: did you mean 'shop.orders'?" in fatal
    assert any("no captured table has this name: did you mean 'shop.orders'?" in message for message in messages)


def _with(text: str) -> str:
    return SOUND[: SOUND.index("sinks:")] + text
