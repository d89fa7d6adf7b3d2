"""Warnings for keys of views that can be NULL in the tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cdc.capture.view_key_checks import view_key_problems
from cdc.config import load_definition
from tests.config.definitions import SOUND, write
from tests.log.rows import schema_of

VIEWS = """exclude: [shop.v_*]
views:
- {name: shop.v_items, key: [item], sql: "SELECT o.item, count(*) AS n FROM shop.orders o GROUP BY o.item"}
- {name: shop.v_over, key: [item], sql: "SELECT upper(item) AS item, n FROM shop.v_items"}
- {name: shop.v_known, key: [item], sql: "SELECT item FROM shop.orders WHERE item IS NOT NULL GROUP BY item"}
- {name: shop.v_ids, key: [id], sql: "SELECT id FROM shop.orders"}
"""


def test_a_nullable_column_in_a_key_is_a_warning_also_below_another_view(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + VIEWS))
    table = schema_of(1, "item")
    found = list(view_key_problems(definition, [table]))

    assert [problem.subject for problem in found] == ["view shop.v_items", "view shop.v_over"]
    assert not any(problem.fatal for problem in found)
    never_null = replace(table, columns=tuple(replace(column, not_null=True) for column in table.columns))
    assert list(view_key_problems(definition, [never_null])) == []
