"""The row lookup by executors: a key search and Spark's join find the same rows for the same parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from pyroaring import BitMap
from pyspark.sql import SparkSession

from cdc.delta_protocol.table_storage import storage_of
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.folding.folded_parts import FoldedParts, FoldedTable, pieces_of
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_key_search import ALL_ROWS, FindableRows, NewVector, SearchedFiles
from pipelines.sinks.delta.executor_row_lookup import PLACE, RowLookup, stored_and_images
from pipelines.sinks.delta.executor_upsert import commit_written, files_to_change
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.indexed.key_index import file_and_row
from pipelines.sinks.delta.stored_columns import StoredColumns
from tests.pipelines.fold_model import log_row, to_arrow
from tests.pipelines.sinks.delta.vector_tables import VECTORS, VectorTable, columns_of, upsert

pytestmark = pytest.mark.usefixtures("with_delta")
COLUMNS = columns_of(("number", pa.int64()), ("id", pa.int32()), ("end", pa.int64()), ("_op", pa.string()))
WANTED = pa.schema([("id", pa.int64()), ("number", pa.int64()), ("new", pa.string())])
"""Columns of the rows to return: the type of one was another before, and one is not in the target."""
PARTS = ((1, 2), (2, 4, 9))
"""Part → the keys of its images; two parts need the rows of one key, and no row has the last key."""
CHANGES = FindableRows(ops=("c", "u"))
FIRST, SECOND = 1, 3
"""Versions: with the rows of the first file, and after some rows were added and one was deleted."""


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> str:
    uri = f"{tmp_path}/table"
    DeltaTable.create(uri, COLUMNS, configuration=VECTORS)
    rows = [(0, 1, 5, "c", 1), (1, 2, None, "c", 2), (2, 4, None, "c", 4)]
    append_to(uri, rows)
    append_to(uri, [(3, 1, None, "u", 5), (4, 3, None, "u", 6), (5, 1, None, "t", 9)])
    target = DeltaTarget(uri, DeltaTable(uri))
    live = files_to_change(target, after=9)
    assert live is not None
    first = [file.rows == len(rows) and file.greatest("number") == 2 for file in live.by_path.values()].index(True)
    searched = SearchedFiles.of(uri, live.by_path.values())
    written = searched.write_vectors_of({first: BitMap([2])})
    vectors = [NewVector.of(row) for batch in written for row in batch.to_pylist()]
    commit_written(target, live, vectors, [], TxnMarker("app", 10))
    return uri


def append_to(uri: str, rows: Sequence[tuple[object, ...]]) -> None:
    """Append (number, id, end, _op, _position) as one file."""
    named = [dict(zip(("number", "id", "end", "_op", "_position"), row, strict=True)) for row in rows]
    write_deltalake(uri, pa.Table.from_pylist([row | {"_ordinal": 0} for row in named], COLUMNS), mode="append")


def parts_in(spark: SparkSession) -> FoldedParts:
    pieces = []
    for part, keys in enumerate(PARTS):
        rows = to_arrow([log_row(1, (10, key), "u", key=[str(key)], after={1: str(key)}) for key in keys])
        folded = pa.Table.from_pylist(rows.to_pylist(), FOLDED_ARROW)
        pieces += list(pieces_of(part, folded))
    sizes = dict.fromkeys(("rows", "keys", "size", "incomplete", "keyless", "committed_at"), 1)
    return FoldedParts(spark.createDataFrame(pa.Table.from_batches(pieces)), FoldedTable(1, **sizes), len(PARTS))


def keys_of(images: pa.Table) -> pa.Table:
    return pa.table({"id": pc.list_element(images["key"], 0).cast(pa.int64())})


def lookup_in(table: str, version: int, current: FindableRows) -> RowLookup:
    return RowLookup(table, version, StoredColumns.of(COLUMNS, WANTED), ("id",), current)


def rows_of_parts(spark: SparkSession, lookup: RowLookup, *, by_search: bool) -> Mapping[int, list[pa.Table]]:
    """What the tasks of each part get."""
    search = lookup.search(len(PARTS)) if by_search else None
    assert (search is not None) == by_search
    frame = lookup.rows(parts_in(spark), keys_of, search)
    of_part: dict[int, list[pa.Table]] = {}
    for row in frame.collect():
        batch = pa.RecordBatch.from_pylist(
            [{"stored": bytes(row["stored"]), "images": row["images"]}],
            pa.schema([("stored", pa.binary()), ("images", pa.binary())]),
        )
        stored, images = stored_and_images(iter([batch]))
        assert not images
        of_part.setdefault(row["part"], []).extend(stored)
    return of_part


def numbers_in(of_part: Mapping[int, list[pa.Table]]) -> dict[int, list[int]]:
    return {part: sorted(pa.concat_tables(tables)["number"].to_pylist()) for part, tables in of_part.items()}


@pytest.mark.parametrize(
    ("version", "current", "expected"),
    [
        (FIRST, ALL_ROWS, {0: [0, 1], 1: [1, 2]}),
        (SECOND, ALL_ROWS, {0: [0, 1, 3, 5], 1: [1]}),
        (SECOND, FindableRows(null_column="end"), {0: [1, 3, 5], 1: [1]}),
        (SECOND, CHANGES, {0: [1, 3], 1: [1]}),
    ],
)
def test_each_part_gets_the_live_rows_of_its_keys_by_search_and_by_join(
    spark: SparkSession, table: str, version: int, current: FindableRows, expected: dict[int, list[int]]
) -> None:
    lookup = lookup_in(table, version, current)
    found = rows_of_parts(spark, lookup, by_search=True)
    assert numbers_in(found) == expected
    assert numbers_in(rows_of_parts(spark, lookup, by_search=False)) == expected
    assert all(rows.select(WANTED.names).schema == WANTED for tables in found.values() for rows in tables)


def test_no_row_is_found_by_a_key_that_the_target_cannot_have(spark: SparkSession, table: str) -> None:
    narrower = StoredColumns.of(COLUMNS, pa.schema([("id", pa.int16()), ("number", pa.int64())]))
    lookup = RowLookup(table, SECOND, narrower, ("id",))
    assert [rows_of_parts(spark, lookup, by_search=by_search) for by_search in (True, False)] == [{}, {}]


def test_found_rows_say_where_they_are(spark: SparkSession, table: str) -> None:
    lookup = lookup_in(table, SECOND, ALL_ROWS)
    tables = rows_of_parts(spark, lookup, by_search=True)[0]
    rows = pa.concat_tables(tables)
    files, places = file_and_row(rows[PLACE].to_numpy())
    live = lookup.live_files()
    assert live is not None
    newest = LiveFiles.read(storage_of(table))
    read = [newest.read_rows(live[file], ["number"])["number"].to_pylist() for file in files.tolist()]
    assert [numbers[row] for numbers, row in zip(read, places.tolist(), strict=True)] == rows["number"].to_pylist()


def test_only_files_of_the_relation_are_searched_in_a_shared_target(tmp_path: Path) -> None:
    columns = columns_of(("id", pa.int64()), ("_relation", pa.int64()))
    table = VectorTable(f"{tmp_path}/table", columns, partition_by=("_relation",))
    table.merge(upsert(1, id=1, _relation=7), upsert(1, id=2, _relation=8))
    stored = StoredColumns.of(columns.remove(1), pa.schema([("id", pa.int64())]))
    live = RowLookup(table.uri, 1, stored, ("id",), relation=8).live_files()
    assert live is not None
    assert [file.add["partitionValues"] for file in live] == [{"_relation": "8"}]
    needing_it = StoredColumns.of(columns, columns)
    assert RowLookup(table.uri, 1, needing_it, ("id",)).live_files() is None
