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


KEEPING = """exclude: [shop.v_*]
views:
- {name: shop.v_number, key: [id], keep: 7d, sql: "SELECT id, item FROM shop.orders"}
- {name: shop.v_time, key: [day, id], keep: 7d, sql: "SELECT o.at AS day, o.id FROM (SELECT * FROM shop.orders) o"}
- {name: shop.v_cast, key: [day], keep: 7d, sql: "SELECT DISTINCT CAST(item AS date) AS day FROM shop.orders"}
"""


def test_a_view_that_keeps_rows_for_a_time_needs_one_time_in_its_key(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, SOUND + KEEPING))
    table = schema_of(1, "item", "at")
    times = tuple(replace(c, type_oid=1184) if c.name == "at" else c for c in table.columns)
    found = [problem for problem in view_key_problems(definition, [replace(table, columns=times)]) if problem.fatal]
    assert [problem.subject for problem in found] == ["view shop.v_number"]
    assert "its key (id) has no columns of type date or timestamp" in found[0].message
