"""Change data files: delta-rs reads the changes of each batch from them, and nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from pipelines.sinks.delta.change_data_files import CHANGE_DATA_FEED
from pipelines.sinks.delta.target_columns import OP
from tests.fixtures.examples import examples
from tests.pipelines.sinks.delta.vector_tables import (
    VECTORS,
    Row,
    VectorTable,
    columns_of,
    delete,
    newest_version,
    upsert,
)

ROWS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from("uuud"), st.sampled_from([0, 1])),
    min_size=1,
    unique_by=lambda row: row[0],
)
KINDS = {"copies": {}, "deletion vectors": VECTORS, "copies, by part": {}}


@pytest.mark.parametrize("kind", KINDS)
@examples(4)
@given(st.lists(ROWS, min_size=2, max_size=5))
def test_the_change_data_feed_has_exactly_the_changes_of_each_batch(
    kind: str, batches: list[list[tuple[int, str, int]]]
) -> None:
    columns = columns_of(("id", pa.int64()), ("item", pa.string()), ("part", pa.int32()))
    partition_by = ("part",) if "part" in kind else ()
    with TemporaryDirectory() as folder:
        table = VectorTable(
            f"{folder}/t", columns, partition_by=partition_by, properties=KINDS[kind] | {CHANGE_DATA_FEED: "true"}
        )
        for number, rows in enumerate(batches):
            before = Counter(map(repr, table.rows()))
            made = {
                key: upsert(number, key, id=key, item=f"{number}", part=part)
                if op == "u"
                else delete(number, key, id=key)
                for key, op, part in rows
            }
            stored = {row["id"] for row in table.rows()}
            table.merge(*made.values())
            gone = Counter[str]()
            come = Counter[str]()
            kinds = Counter[tuple[int, str]]()
            for row in changes_of(table, columns):
                kinds[row["id"], row["_change_type"]] += 1
                image = repr({name: row[name] for name in columns.names})
                (gone if row["_change_type"] in {"delete", "update_preimage"} else come)[image] += 1
            assert before - gone + come == Counter(map(repr, table.rows()))
            assert kinds == Counter(expected_kinds(made, stored))
        table.close()


def expected_kinds(made: Mapping[int, Row], stored: set[int]) -> list[tuple[int, str]]:
    """Return (id, kind of change) of each row that the feed must have. stored: the ids before the batch."""
    expected = list[tuple[int, str]]()
    for key, row in made.items():
        if row[OP] == "u":
            expected += [(key, "update_preimage"), (key, "update_postimage")] if key in stored else [(key, "insert")]
        elif key in stored:
            expected.append((key, "delete"))
    return expected


def changes_of(table: VectorTable, columns: pa.Schema) -> list[dict[str, Any]]:
    """Return the changes of the newest version, as delta-rs reads them."""
    version = newest_version(table.uri)
    read = pa.table(DeltaTable(table.uri).load_cdf(starting_version=version, ending_version=version))
    return read.select([*columns.names, "_change_type"]).to_pylist()
