"""The indexed writer and Spark write one target in turn; delta-rs and Spark then read the same rows, the expected ones.

Spark marks rows in deletion vectors of its own, rewrites files, purges and restores; the index has to follow.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from cdc.targets.lake_reader import read_target
from pipelines.sinks.contract import Published
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import Row, batch, gone, put

Items = dict[int, str]
Client = Callable[["SharedTarget"], None]
KEYS = 60
ROUNDS = 14


class SharedTarget:
    """A target that the sink and Spark write, and the rows that it should have."""

    def __init__(self, folder: Path, spark: SparkSession, random: Random) -> None:
        self._spark, self.random, self._folder = spark, random, folder
        self._upto = 0
        self.items: Items = {}
        self.uri = f"{folder}/lake/shop/orders"
        self.open()

    def open(self) -> None:
        """Start a new driver."""
        settings = DeltaSettings(
            "lake", f"{self._folder}/lake/{{schema}}/{{table}}", Writer.INDEXED, index_folder=f"{self._folder}/index"
        )
        self.sink = DeltaSink(settings, self._spark)
        self.sink.open("log-1")

    def sql(self, statement: str) -> None:
        """Run a statement of Spark on the target."""
        self._spark.sql(statement.replace("TARGET", f"delta.`{self.uri}`")).collect()

    def merge(self) -> None:
        """Merge and publish a random batch."""
        rows: list[Row] = []
        before, self._upto = self._upto, self._upto + 100
        for place, key in enumerate(self.random.sample(range(KEYS), 15)):
            if self.random.random() < 0.3:
                self.items.pop(key, None)
                rows.append(gone(key, self._upto - 50, ordinal=place))
            else:
                self.items[key] = f"{key} at {self._upto}"
                rows.append(put(key, self.items[key], self._upto - 50, ordinal=place))
        record = self.sink.apply(batch(rows, before, self._upto, generation=1 if not before else None))
        self.sink.publish(Published(self._upto, self._upto, {record.relation: record}))
        assert self.sink.parts.writers.indexed.refused == {}

    @property
    def version(self) -> int:
        """The newest version of the target."""
        return DeltaTable(self.uri).version()

    def by_delta_rs(self) -> list[tuple[int, str]]:
        """Return the rows that delta-rs reads."""
        rows = read_target(self.uri).read_all()
        return sorted(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))

    def by_spark(self) -> list[tuple[int, str]]:
        """Return the rows that Spark reads."""
        rows: list[Any] = self._spark.read.format("delta").load(self.uri).select("id", "item").collect()
        return sorted((row["id"], row["item"]) for row in rows)


def delete(target: SharedTarget) -> None:
    low = target.random.randrange(KEYS - 5)
    target.sql(f"DELETE FROM TARGET WHERE id BETWEEN {low} AND {low + 4}")
    target.items = {key: item for key, item in target.items.items() if not low <= key <= low + 4}


def update(target: SharedTarget) -> None:
    low = target.random.randrange(KEYS - 5)
    target.sql(f"UPDATE TARGET SET item = 'by Spark' WHERE id BETWEEN {low} AND {low + 4}")
    target.items |= {key: "by Spark" for key in target.items if low <= key <= low + 4}


def merge(target: SharedTarget) -> None:
    low = target.random.randrange(KEYS - 5)
    target.sql(
        f"MERGE INTO TARGET t USING (SELECT id FROM range({low}, {low + 5})) s ON t.id = s.id "
        "WHEN MATCHED AND t.id % 2 = 0 THEN DELETE WHEN MATCHED THEN UPDATE SET item = 'merged' "
        "WHEN NOT MATCHED THEN INSERT (id, item, _position, _ordinal) VALUES (s.id, 'inserted', 0, 0)"
    )
    for key in range(low, low + 5):
        if key not in target.items:
            target.items[key] = "inserted"
        elif key % 2:
            target.items[key] = "merged"
        else:
            del target.items[key]


def optimize(target: SharedTarget) -> None:
    target.sql("OPTIMIZE TARGET")


def purge(target: SharedTarget) -> None:
    target.sql("REORG TABLE TARGET APPLY (PURGE)")


def vacuum(target: SharedTarget) -> None:
    target.sql("SET spark.databricks.delta.retentionDurationCheck.enabled = false")
    target.sql("VACUUM TARGET RETAIN 0 HOURS")


def add_column(target: SharedTarget) -> None:
    target.sql(f"ALTER TABLE TARGET ADD COLUMN note_{target.random.randrange(10**9)} STRING")


def set_properties(target: SharedTarget) -> None:
    target.sql(f"ALTER TABLE TARGET SET TBLPROPERTIES ('cost_center' = 'team {target.random.randrange(10**9)}')")


def restore(target: SharedTarget) -> None:
    """Another client changes rows, and then restores the version before its changes."""
    items, version = dict(target.items), target.version
    delete(target)
    update(target)
    target.sql(f"RESTORE TABLE TARGET TO VERSION AS OF {version}")
    target.items = items


def restart(target: SharedTarget) -> None:
    target.sink.close()
    target.open()


CLIENTS: tuple[Client, ...] = (
    delete,
    update,
    merge,
    optimize,
    purge,
    vacuum,
    add_column,
    set_properties,
    restore,
    restart,
)


@pytest.mark.usefixtures("with_delta")
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_rows_are_the_expected_ones_whatever_spark_did_in_between(
    tmp_path: Path, spark: SparkSession, seed: int
) -> None:
    target = SharedTarget(tmp_path, spark, Random(seed))
    target.merge()
    order = [client for client in CLIENTS for _ in range(2)]
    target.random.shuffle(order)
    for client in order[:ROUNDS]:
        client(target)
        target.merge()
        assert target.by_delta_rs() == sorted(target.items.items()), client.__name__
    assert target.by_spark() == sorted(target.items.items())
    target.sink.close()
