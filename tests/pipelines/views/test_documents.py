"""Documents in a real Spark: each has the rows of the tables that belong to it, under random changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest
from pyspark.sql import SparkSession

from tests.pipelines.views.shop_tables import TABLES
from tests.pipelines.views.test_view_engine import change
from tests.pipelines.views.view_pipeline import ViewPipeline

pytestmark = [pytest.mark.usefixtures("with_delta"), pytest.mark.slow]

_ITEMS: Final = {"table": "shop.items", "on": {"order_id": "id"}, "fields": ["sku", "price"], "order_by": ["id"]}
_CUSTOMER: Final = {"table": "shop.customers", "on": {"id": "customer_id"}}
ORDERS: Final[dict[str, Any]] = {
    "name": "shop.v_orders",
    "root": "shop.orders",
    "include": {"customer": _CUSTOMER, "items": _ITEMS},
}
CUSTOMERS: Final[dict[str, Any]] = {
    "name": "shop.v_customers",
    "root": "shop.customers",
    "fields": ["id", "name"],
    "include": {
        "orders": {
            "table": "shop.orders",
            "on": {"customer_id": "id"},
            "fields": "id",
            "order_by": ["status", "id"],
            "include": {"items": _ITEMS},
        }
    },
}


def expected(shop: ViewPipeline) -> dict[str, dict[str, Any]]:
    """View → key → row, made of the rows that the source has."""
    customers, orders, items = (list(shop.tables[topic].values()) for topic in TABLES)

    def items_of(order: str | None) -> list[dict[str, Any]]:
        found = sorted((row for row in items if row[1] == order), key=lambda row: int(row[0] or 0))
        return [{"sku": row[2], "price": None if row[4] is None else float(row[4])} for row in found]

    named = {id_: {"id": int(id_ or 0), "name": name} for id_, name in customers}
    by_order = {
        str(id_): [id_, customer, status, day, named.get(customer), items_of(id_)]
        for id_, customer, status, day in orders
    }
    by_customer = {
        str(id_): [
            id_,
            name,
            [
                {"id": int(order[0] or 0), "items": items_of(order[0])}
                for order in sorted(orders, key=lambda row: (row[2] or "", int(row[0] or 0)))
                if order[1] == id_
            ],
        ]
        for id_, name in customers
    }
    return {"shop.v_orders": by_order, "shop.v_customers": by_customer}


def present(shop: ViewPipeline, view: str) -> Mapping[str, Any]:
    kinds = [column.type_name for column in shop.views.schemas()[view].columns]
    return {
        str(row[0]): [json.loads(v) if kind == "jsonb" and v else v for kind, v in zip(kinds, row, strict=True)]
        for row in shop.rows(view)
    }


@pytest.mark.parametrize("seed", range(3))
def test_documents_follow_all_their_tables(tmp_path: Path, spark: SparkSession, seed: int) -> None:
    chance = Random(seed)
    more = f"documents: {json.dumps([ORDERS, CUSTOMERS])}\n"
    shop = ViewPipeline(tmp_path / "shop", spark.newSession(), TABLES.values(), [], more)
    try:
        for _ in range(10):
            for _ in range(chance.randint(1, 6)):
                shop.write(*(change(chance, shop) for _ in range(chance.randint(1, 4))))
            shop.compute()
            for view, rows in expected(shop).items():
                assert shop.engine.figures[view].state == "live", shop.engine.figures[view].reason
                assert present(shop, view) == rows
    finally:
        shop.close()
