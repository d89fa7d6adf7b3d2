"""The search of keys by executors: the rows of each file with a wanted key, and the vectors that delete them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyroaring import BitMap
from pyspark.sql import SparkSession

from cdc.delta_protocol.deletion_vectors import decode, encode
from cdc.delta_protocol.table_storage import storage_of
from cdc.errors import TargetDamaged
from pipelines.sinks.delta.executor_key_search import ENTRIES, KeySearch, NewVector, SearchedFile, SearchedFiles
from pipelines.sinks.delta.stored_columns import StoredColumns

SECRET = bytes(range(16))
KEY = pa.schema([("tenant", pa.string()), ("id", pa.int64())])


def keys(numbers: range) -> pa.Table:
    """Keys of two columns; two tenants have each number."""
    tenants, ids = zip(*((tenant, number) for number in numbers for tenant in ("a", "b")), strict=True)
    return pa.table({"tenant": tenants, "id": pa.array(ids, pa.int64())})


def search_in(folder: Path, tables: list[pa.Table], deleted: dict[int, BitMap]) -> KeySearch:
    """The search in files with these keys, of which some rows are deleted already."""
    files = []
    (folder / "_vectors").mkdir(parents=True)
    for number, table in enumerate(tables):
        pq.write_table(table.append_column("value", [["any"] * table.num_rows]), folder / f"{number}.parquet")
        vector = None
        if number in deleted:
            path, content, (vector,) = encode([deleted[number]])
            storage_of(str(folder)).write(path, content)
        files.append(SearchedFile(f"{number}.parquet", table.num_rows if number else None, vector))
    key = StoredColumns.of(KEY, KEY)
    return KeySearch(searched=SearchedFiles(str(folder), tuple(files)), key=key, shards=3, tasks=2, secret=SECRET)


def written(spark: SparkSession, search: KeySearch, wanted: pa.Table) -> list[NewVector]:
    def entries(_: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from search.wanted(wanted)

    frame = spark.range(0, 1, 1, 1).mapInArrow(entries, ENTRIES)
    return sorted(search.searched.write_vectors(search.find(spark, frame)), key=lambda vector: vector.file)


def test_the_rows_with_wanted_keys_join_those_that_are_deleted_already(spark: SparkSession, tmp_path: Path) -> None:
    tables = [keys(range(10)), keys(range(10, 12)), keys(range(20, 30)), keys(range(40, 50))]
    search = search_in(tmp_path, tables, {1: BitMap([0]), 2: BitMap([0, 19])})
    wanted = pa.concat_tables([keys(range(3, 5)), keys(range(10, 12)), keys(range(25, 26)), keys(range(90, 99))])
    vectors = written(spark, search, wanted)

    assert [(vector.file, vector.deleted) for vector in vectors] == [(0, 4), (1, 4), (2, 4)]
    assert [vector.descriptor is None for vector in vectors] == [False, True, False]
    read = storage_of(str(tmp_path)).read
    assert {v.file: set(decode(v.descriptor, read)) for v in vectors if v.descriptor} == {
        0: {6, 7, 8, 9},
        2: {0, 10, 11, 19},
    }
    assert {v.size for v in vectors} == {(tmp_path / vectors[0].path).stat().st_size}


def test_without_a_wanted_key_no_vector_is_written(spark: SparkSession, tmp_path: Path) -> None:
    search = search_in(tmp_path, [keys(range(5))], {})
    assert written(spark, search, keys(range(7, 9))) == []
    assert not list((tmp_path / "_vectors").iterdir())


def test_a_missing_data_file_is_damage(spark: SparkSession, tmp_path: Path) -> None:
    search = search_in(tmp_path, [keys(range(5))], {})
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(TargetDamaged, match=r"0\.parquet"):
        written(spark, search, keys(range(1)))


def test_executors_get_the_search_pickled_and_descriptors_survive_json(tmp_path: Path) -> None:
    search = search_in(tmp_path, [keys(range(5))], {0: BitMap([1])})
    assert json.loads(json.dumps(search.searched.files[0].vector)) == search.searched.files[0].vector
