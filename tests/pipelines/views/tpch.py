"""Tables like those of TPC-H with random rows, random changes of them, and views in the shape of its queries."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

from tests.pipelines.views.view_pipeline import Change, Key, Values, ViewPipeline, table_of

TABLES: Final = (
    table_of(201, "tpch.region", "r_regionkey integer", "r_name text"),
    table_of(202, "tpch.nation", "n_nationkey integer", "n_name text", "n_regionkey integer"),
    table_of(203, "tpch.supplier", "s_suppkey integer", "s_name text", "s_nationkey integer"),
    table_of(
        204,
        "tpch.customer",
        "c_custkey integer",
        "c_name text",
        "c_nationkey integer",
        "c_phone text",
        "c_acctbal numeric(15,2)",
        "c_mktsegment text",
    ),
    table_of(
        205,
        "tpch.orders",
        "o_orderkey integer",
        "o_custkey integer",
        "o_orderdate date",
        "o_totalprice numeric(15,2)",
        "o_shippriority integer",
    ),
    table_of(
        206,
        "tpch.lineitem",
        "l_orderkey integer",
        "l_linenumber integer",
        "l_suppkey integer",
        "l_quantity numeric(15,2)",
        "l_extendedprice numeric(15,2)",
        "l_discount numeric(15,2)",
        "l_tax numeric(15,2)",
        "l_returnflag text",
        "l_linestatus text",
        "l_shipdate date",
        key=2,
    ),
)
REGIONS: Final = ("ASIA", "EUROPE")
SEGMENTS: Final = ("BUILDING", "MACHINERY")
NATIONS, SUPPLIERS, CUSTOMERS, ORDERS = 4, 8, 15, 60
"""Numbers of rows."""
_CHANGED: Final = (
    *("tpch.lineitem",) * 4,
    *("tpch.orders",) * 2,
    "tpch.customer",
    "tpch.supplier",
    "tpch.nation",
)
"""The tables that change, some more often than others."""

VIEWS: Final[dict[str, dict[str, Any]]] = {
    "Q1": {
        "name": "tpch.v_q1",
        "key": ["l_returnflag", "l_linestatus"],
        "sql": """SELECT l_returnflag, l_linestatus, sum(l_quantity) AS sum_qty, sum(l_extendedprice) AS sum_base_price,
          sum(l_extendedprice * (1 - l_discount)) AS sum_disc_price,
          sum(l_extendedprice * (1 - l_discount) * (1 + l_tax)) AS sum_charge, avg(l_quantity) AS avg_qty,
          avg(l_extendedprice) AS avg_price, avg(l_discount) AS avg_disc, count(*) AS count_order
        FROM tpch.lineitem WHERE l_shipdate <= DATE '1998-09-02' GROUP BY l_returnflag, l_linestatus""",
    },
    "Q3": {
        "name": "tpch.v_q3",
        "key": ["l_orderkey"],
        "sql": """SELECT l_orderkey, sum(l_extendedprice * (1 - l_discount)) AS revenue, o_orderdate, o_shippriority
        FROM tpch.customer, tpch.orders, tpch.lineitem
        WHERE c_mktsegment = 'BUILDING' AND c_custkey = o_custkey AND l_orderkey = o_orderkey
          AND o_orderdate < DATE '1995-03-15' AND l_shipdate > DATE '1995-03-15'
        GROUP BY l_orderkey, o_orderdate, o_shippriority""",
    },
    "Q5": {
        "name": "tpch.v_q5",
        "key": ["n_name"],
        "sql": """SELECT n_name, sum(l_extendedprice * (1 - l_discount)) AS revenue
        FROM tpch.customer, tpch.orders, tpch.lineitem, tpch.supplier, tpch.nation, tpch.region
        WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND l_suppkey = s_suppkey AND c_nationkey = s_nationkey
          AND s_nationkey = n_nationkey AND n_regionkey = r_regionkey AND r_name = 'ASIA'
          AND o_orderdate >= DATE '1994-01-01' AND o_orderdate < DATE '1996-01-01'
        GROUP BY n_name""",
    },
    "Q10": {
        "name": "tpch.v_q10",
        "key": ["c_custkey"],
        "sql": """SELECT c_custkey, c_name, sum(l_extendedprice * (1 - l_discount)) AS revenue, c_acctbal, n_name,
          c_phone
        FROM tpch.customer, tpch.orders, tpch.lineitem, tpch.nation
        WHERE c_custkey = o_custkey AND l_orderkey = o_orderkey AND o_orderdate >= DATE '1994-01-01'
          AND o_orderdate < DATE '1996-01-01' AND l_returnflag = 'R' AND c_nationkey = n_nationkey
        GROUP BY c_custkey, c_name, c_acctbal, c_phone, n_name""",
    },
    "Q18": {
        "name": "tpch.v_q18",
        "key": ["o_orderkey"],
        "sql": """SELECT c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice, sum(l_quantity) AS quantity
        FROM tpch.customer JOIN tpch.orders ON c_custkey = o_custkey
        JOIN tpch.lineitem ON o_orderkey = l_orderkey
        LEFT SEMI JOIN (
          SELECT l_orderkey AS large FROM tpch.lineitem GROUP BY l_orderkey HAVING sum(l_quantity) > 60
        ) t ON o_orderkey = large
        GROUP BY c_name, c_custkey, o_orderkey, o_orderdate, o_totalprice""",
    },
}


def filled(random: Random) -> Iterator[Change]:
    """The first rows of all tables."""
    for number, name in enumerate(REGIONS):
        yield Change("tpch.region", "c", (str(number), name))
    for topic, number in (("nation", NATIONS), ("supplier", SUPPLIERS), ("customer", CUSTOMERS), ("orders", ORDERS)):
        for key in range(number):
            yield Change(f"tpch.{topic}", "c", _row(random, f"tpch.{topic}", (str(key),)))
    for order in range(ORDERS):
        for line in range(random.randint(1, 5)):
            yield Change("tpch.lineitem", "c", _row(random, "tpch.lineitem", (str(order), str(line))))


def changed(random: Random, pipeline: ViewPipeline) -> Change:
    """One change of a random table: an insert, an update, a delete, or an update of the key."""
    topic = random.choice(
        ["tpch.lineitem"] * 4 + ["tpch.orders"] * 2 + ["tpch.customer", "tpch.supplier", "tpch.nation"]
    )
    known = pipeline.tables[topic]
    key = _key(random, topic)
    if key not in known:
        if known and random.random() < 0.2:
            return Change(topic, "u", _row(random, topic, key), old_key=random.choice(sorted(known)))
        return Change(topic, "c", _row(random, topic, key))
    if random.random() < 0.3:
        return Change(topic, "d", known[key])
    # one column changes; the others have their values
    values, other = list(known[key]), _row(random, topic, key)
    place = random.randrange(len(key), len(values))
    values[place] = other[place]
    return Change(topic, "u", tuple(values))


def _key(random: Random, topic: str) -> Key:
    if topic == "tpch.lineitem":
        return str(random.randrange(ORDERS + 5)), str(random.randrange(5))
    numbers = {"tpch.nation": NATIONS, "tpch.supplier": SUPPLIERS, "tpch.customer": CUSTOMERS, "tpch.orders": ORDERS}
    return (str(random.randrange(numbers[topic] + 2)),)


def _row(random: Random, topic: str, key: Key) -> Values:
    if topic == "tpch.nation":
        return (*key, f"NATION {key[0]}", str(random.randrange(len(REGIONS))))
    if topic == "tpch.supplier":
        return (*key, f"Supplier {key[0]}", str(random.randrange(NATIONS)))
    if topic == "tpch.customer":
        name = f"Customer {random.randrange(100)}"
        return *key, name, str(random.randrange(NATIONS)), f"1-{key[0]}", _price(random), random.choice(SEGMENTS)
    if topic == "tpch.orders":
        return *key, str(random.randrange(CUSTOMERS)), _date(random), _price(random), str(random.randrange(2))
    quantity, discount, tax = f"{random.randint(1, 50)}.00", f"0.{random.randrange(11):02}", f"0.0{random.randrange(9)}"
    status = random.choice(("A", "R", "N")), random.choice(("O", "F"))
    return *key, str(random.randrange(SUPPLIERS)), quantity, _price(random), discount, tax, *status, _date(random)


def _price(random: Random) -> str:
    return f"{random.randint(-999, 99_999)}.{random.randrange(100):02}"


def _date(random: Random) -> str:
    return f"{random.randint(1994, 1998)}-{random.randint(1, 12):02}-{random.randint(1, 28):02}"
