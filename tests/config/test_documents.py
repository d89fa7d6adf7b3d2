"""Documents: the view that each becomes, and places of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from cdc.config import check_definition, load_definition
from cdc.config.views import Incremental
from cdc.view_sql.view_query import queries_of
from tests.config.definitions import SOUND, write

ORDERS: Final = """\
exclude: [shop.v_*]
views: [{name: shop.v_ids, key: [id], sql: SELECT id FROM shop.orders}]
documents:
- name: shop.v_documents
  root: shop.orders
  fields: [id, status]
  incremental: required
  include:
    customer: {table: shop.customers, on: {id: customer_id}, fields: [name]}
    items: {table: shop.items, on: {order_id: id}, fields: [sku], order_by: [line]}
"""


def sql(tmp_path: Path, text: str) -> str:
    definition = load_definition(write(tmp_path, f"{SOUND}{text}"), {})
    (query,) = (one for name, one in queries_of(definition.views).items() if name != "shop.v_ids")
    assert query.only_refresh is None
    return query.sql


def test_a_document_is_a_view_after_the_others(tmp_path: Path) -> None:
    definition = load_definition(write(tmp_path, f"{SOUND}{ORDERS}"), {})
    (_, view), documents = definition.views, definition.documents

    items = "sort_array(collect_list(struct(`items`.`line` AS order_0, struct(`items`.`sku`) AS element))"
    assert (view.name, view.key, view.incremental, documents) == ("shop.v_documents", ("id",), Incremental.REQUIRED, ())
    assert view.sql.splitlines() == [
        "SELECT",
        "  `root`.`id`,",
        "  `root`.`status`,",
        "  CASE WHEN `customer`.`id` IS NOT NULL THEN struct(`customer`.`name`) END AS `customer`,",
        f"  transform({items} FILTER (WHERE `items`.`order_id` IS NOT NULL)), one -> one.element) AS `items`",
        "FROM `shop`.`orders` AS `root`",
        "LEFT JOIN `shop`.`customers` AS `customer` ON `customer`.`id` = `root`.`customer_id`",
        "LEFT JOIN `shop`.`items` AS `items` ON `items`.`order_id` = `root`.`id`",
        "GROUP BY ALL",
    ]


def test_each_of_several_lists_is_collected_in_a_subquery(tmp_path: Path) -> None:
    notes = "    notes: {table: shop.notes, on: {order_id: id}, order_by: at}\n"
    text = sql(tmp_path, ORDERS + notes)

    assert "GROUP BY ALL" not in text
    assert "coalesce(`notes`.elements, array()) AS `notes`" in text
    assert "  GROUP BY `notes`.`order_id`\n) AS `notes` ON `notes`.`on_order_id` = `root`.`id`" in text
    inner = ORDERS.replace(
        "order_by: [line]", "order_by: line, include: {uses: {table: shop.u, on: {a: b}, order_by: c}}"
    )
    assert sql(tmp_path, inner).count("GROUP BY `") == 2


@pytest.mark.parametrize(
    ("old", "new", "key", "message"),
    [
        ("on: {id: customer_id}, ", "", "documents.0.include.customer.on", "required"),
        ("root: shop.orders", "root: orders", "documents.0.root", "expected schema.table"),
        ("    customer:", "    status:", "documents.0", "'fields' and 'include' have the same name 'status'"),
        ("fields: [id, status]", "fields: [status]", "documents.0", "'fields' must have all columns of the key"),
        ("on: {order_id: id}", "no: {order_id: id}", "documents.0.include.items.no", "unknown key"),
        ("shop.v_documents", "shop.documents", "documents.0.name", "a glob of 'tables' matches this name"),
        ("name: shop.v_documents", "name: shop.v_ids", "documents.0.name", "another view has this name"),
        ("root: shop.orders", "root: shop.v_documents", "documents.0", "CDC-8010 view 'shop.v_documents' reads itself"),
    ],
)
def test_what_is_wrong_with_a_document_has_its_place(
    tmp_path: Path, old: str, new: str, key: str, message: str
) -> None:
    assert old in ORDERS
    issues = check_definition(write(tmp_path, f"{SOUND}{ORDERS.replace(old, new)}"), {}).issues
    found: dict[str, Any] = {issue.key: issue.message for issue in issues}

    assert message in found[key], found
