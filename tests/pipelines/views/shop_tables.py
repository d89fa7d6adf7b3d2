"""The tables of a shop, for views of them."""

from __future__ import annotations

from typing import Final

from tests.pipelines.views.view_pipeline import table_of

CUSTOMERS: Final = table_of(101, "shop.customers", "id integer", "name text")
ORDERS: Final = table_of(102, "shop.orders", "id integer", "customer_id integer", "status text", "day date")
ITEMS: Final = table_of(
    103,
    "shop.items",
    "id integer",
    "order_id integer",
    "sku text",
    "quantity integer",
    "price numeric(10,2)",
)
TABLES: Final = {schema.topic: schema for schema in (CUSTOMERS, ORDERS, ITEMS)}
