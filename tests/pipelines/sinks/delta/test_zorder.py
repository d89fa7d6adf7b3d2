"""Targets whose rule says cluster_by: which files upkeep puts in order, and when."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake

from cdc.config import SinkRule
from cdc.targets.published_record import Published, TableRecord
from pipelines.sinks.delta.delta_target import APP_ID, DeltaTarget
from pipelines.sinks.delta.maintenance import ORDERED, TargetMaintenance, UpkeepSettings, ZOrdering
from pipelines.sinks.delta.published_cuts_table import KeptCut
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, column, put
from tests.pipelines.sinks.maintained_sink import LOG, Clock

ROWS = 2_000
NUMBER = column(3, "number", "double precision", oid=701)
SMALL = ZOrdering(least=0, file=1 << 14)


def bounds(uri: str, column: str) -> list[tuple[int, int]]:
    """The least and the greatest value of each file."""
    found = pa.table(DeltaTable(uri).get_add_actions(flatten=True))
    return sorted(zip(found[f"min.{column}"].to_pylist(), found[f"max.{column}"].to_pylist(), strict=True))


def apart(bounds: list[tuple[int, int]]) -> bool:
    return all(one[1] <= other[0] for one, other in pairwise(bounds))


def grow(uri: str, rows: int = ROWS, seed: int = 1, **parts: int) -> None:
    """One more file with so many rows, in no order."""
    random = np.random.default_rng(seed)
    columns = {"id": random.integers(0, 1 << 60, rows), "other": random.integers(0, 1 << 60, rows)}
    columns |= {name: np.full(rows, value) for name, value in parts.items()}
    write_deltalake(uri, pa.table(columns), mode="append", partition_by=list(parts) or None)


def target_of(uri: str, by: tuple[str, ...] = ("id",)) -> DeltaTarget:
    """As a driver opens it whose rule says so."""
    found = DeltaTarget.open(uri)
    assert found is not None
    found.cluster_by = by
    return found


def order_all(uri: str, ordering: ZOrdering = SMALL, by: tuple[str, ...] = ("id",)) -> int:
    """Order what is due; how many parts that were."""
    target, done = target_of(uri, by), 0
    while (due := ordering.due(target)) and done < 10:
        ordering.order(target, due[0])
        done += 1
    return done


def test_a_sink_whose_rule_names_a_column_has_files_that_a_query_of_it_skips(tmp_path: Path):
    settings, clock = UpkeepSettings(every=10, ordering=SMALL), Clock()
    rules = (SinkRule(match="shop.*", cluster_by=("item",)),)
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=rules, upkeep=settings))
    sink._maintenance = TargetMaintenance(settings, clock)  # what comes when does not depend on the machine
    sink.open(LOG)
    random, items = Random(1), [f"item {number:05}" for number in range(ROWS)]
    random.shuffle(items)
    texts = [f"{item} {random.getrandbits(200)}" for item in items]
    for upto in (10, 20):
        half = [put(n, texts[n], upto, ordinal=n) for n in range(ROWS) if n % 2 == upto // 10 - 1]
        record = sink.apply(batch(half, upto - 10, upto, generation=1 if upto == 10 else None))
    assert not apart(bounds(record.target, "item"))
    for position in range(20, 25):  # a look comes so seldom that always something else is due as well
        clock.now += 100
        sink.publish(Published(position, position, {ORDERS.relation: record}))

    found = bounds(record.target, "item")
    assert len(found) > 1
    assert apart(found)
    assert sorted(pa.table(DeltaTable(record.target).scan(["item"]))["item"].to_pylist()) == sorted(texts)
    sink.apply(batch([put(1, "another", 30)], 20, 30))  # the writer goes on from there
    assert pa.table(DeltaTable(record.target).scan(["id"])).num_rows == ROWS


def test_what_is_in_order_is_written_anew_when_a_quarter_of_it_is_new_and_not_before(tmp_path: Path):
    uri = str(tmp_path)
    grow(uri)
    assert order_all(uri) == 1
    assert order_all(uri) == 0  # nor after a restart
    before = set(DeltaTable(uri).file_uris())
    grow(uri, ROWS // 5)
    assert order_all(uri) == 0
    assert before < set(DeltaTable(uri).file_uris())
    grow(uri, ROWS // 5)
    assert order_all(uri) == 1
    assert not before & set(DeltaTable(uri).file_uris())
    assert apart(bounds(uri, "id"))


def test_other_columns_than_before_are_another_order(tmp_path: Path):
    uri = str(tmp_path)
    grow(uri)
    assert order_all(uri) == 1
    assert order_all(uri, by=("other",)) == 1
    assert (apart(bounds(uri, "id")), apart(bounds(uri, "other"))) == (False, True)


def test_partitions_are_put_in_order_one_by_one_and_the_others_are_left(tmp_path: Path):
    uri = str(tmp_path)
    for part in (1, 2, 3):
        grow(uri, part=part)
    assert order_all(uri) == 3
    before = set(DeltaTable(uri).file_uris())
    grow(uri, part=2)
    assert order_all(uri) == 1
    after = set(DeltaTable(uri).file_uris())

    assert {path for path in before - after if "part=2" not in path} == set()
    assert {path for path in before & after if "part=2" in path} == set()


def test_rows_without_a_value_to_part_them_by_are_a_partition_too(tmp_path: Path):
    uri, empty = str(tmp_path), pa.array([None] * 10, pa.string())
    for _ in range(2):
        write_deltalake(uri, pa.table({"id": range(10), "part": empty}), mode="append", partition_by=["part"])
    assert order_all(uri) == 1
    assert len(DeltaTable(uri).file_uris()) == 1


def test_a_part_that_is_large_or_tiny_is_left_as_it_is(tmp_path: Path):
    uri = str(tmp_path)
    grow(uri)
    (size,) = pa.table(DeltaTable(uri).get_add_actions(flatten=True))["size_bytes"].to_pylist()
    for ordering in (ZOrdering(least=size + 1), ZOrdering(least=0, most=size - 1)):
        assert order_all(uri, ordering) == 0
    assert order_all(uri, ZOrdering(least=size, most=size)) == 1


def test_a_target_without_the_columns_or_without_such_a_rule_is_left_as_it_is(tmp_path: Path):
    uri = str(tmp_path)
    grow(uri)
    assert order_all(uri, by=("gone",)) == order_all(uri, by=()) == 0


def test_a_target_that_cannot_be_put_in_order_still_loses_what_nobody_needs(tmp_path: Path):
    uri, clock = str(tmp_path / "table"), Clock()
    mapped = {"delta.columnMapping.mode": "name", APP_ID: "target-1"}  # delta-rs orders no such table
    columns = pa.schema([("id", pa.int64())])
    DeltaTable.create(uri, columns, configuration=mapped, raise_if_key_not_exists=False)
    write_deltalake(uri, pa.table({"id": range(10)}), mode="append")
    target, settings = target_of(uri), UpkeepSettings(every=1, vacuum_after=0, ordering=SMALL)
    upkeep, waste = TargetMaintenance(settings, clock), tmp_path / "table" / "waste.parquet"
    record = TableRecord(1, "shop.orders", uri, 10, target.version, "streaming")
    cuts = [KeptCut.of(1, Published(10, 10, {1: record}))]
    for _ in range(3):
        clock.now += 10
        upkeep.turn(cuts, {uri: target})
    waste.touch()
    os.utime(waste, (0, 0))
    for _ in range(4):
        clock.now += 10
        upkeep.turn(cuts, {uri: target})

    assert not waste.exists()
    assert ORDERED not in target.table.metadata().configuration


def test_the_columns_of_a_wide_table_have_bounds_in_its_files(tmp_path: Path):
    wide = [column(number, f"c{number}") for number in range(4, 50)]
    rules = (SinkRule(match="shop.*", cluster_by=("c49",)),)
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", rules=rules))
    sink.open(LOG)
    table = replace(ORDERS, columns=(*ORDERS.columns, *wide))
    row = replace(put(1, "a", 10), after={1: "1", 2: "a", 3: "1.00", **{c.id: "x" for c in wide}})
    record = sink.apply(batch([row], 0, 20, table))

    assert "min.c49" in pa.table(DeltaTable(record.target).get_add_actions(flatten=True)).column_names
