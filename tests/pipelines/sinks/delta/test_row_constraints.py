"""Row constraints: a batch with a row that violates one is refused as a whole, and others are merged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tests.pipelines.sinks.added_features import commit
from tests.pipelines.sinks.delta.test_indexed_writer import data_files, items_in, metadata_of
from tests.pipelines.sinks.delta.vector_tables import COLUMNS, VectorTable, newest_version, source_of, upsert

CHECK = "delta.constraints.positive"


@pytest.fixture(name="two")
def _two(tmp_path: Path) -> VectorTable:
    """A table without deletion vectors that has two rows in one file."""
    table = VectorTable(str(tmp_path / "table"), properties={})
    table.merge(upsert(1, id=1, item="a"), upsert(1, 1, id=2, item="b"))
    return table


CONSTRAINTS: dict[str, Callable[[VectorTable], dict[str, Any]]] = {
    "check": lambda _: {"configuration": {CHECK: "id > 0"}},
    "invariant": lambda table: {
        "schemaString": changed_field(table, metadata={"delta.invariants": invariant("id > 0")})
    },
    "not null": lambda table: {"schemaString": changed_field(table, nullable=False)},
}


def changed_field(table: VectorTable, **changed: Any) -> str:
    """Return the schema of the table with changes to its first column."""
    schema = json.loads(table.files().metadata["schemaString"])
    schema["fields"][0] |= changed
    return json.dumps(schema)


def invariant(expression: str) -> str:
    """Return an invariant as the metadata of a column contains it."""
    return json.dumps({"expression": {"expression": expression}})


@pytest.mark.parametrize("constraint", CONSTRAINTS)
def test_rows_that_violate_a_constraint_are_refused_and_others_are_merged(two: VectorTable, constraint: str) -> None:
    protocol = {"minReaderVersion": 1, "minWriterVersion": 3}  # the one with CHECK constraints
    commit(two.uri, {"protocol": protocol}, metadata_of(two.uri, **CONSTRAINTS[constraint](two)))
    two.columns = pa.schema(DeltaTable(two.uri).schema().to_arrow())
    two.reopen()
    before, version = data_files(two), newest_version(two.uri)
    bad = upsert(2, id=None if constraint == "not null" else -1, item="bad")
    source = source_of(COLUMNS, [bad, upsert(2, 1, id=2, item="B")])
    with pytest.raises(DeltaError):
        two.merge_source(source)
    assert (newest_version(two.uri), data_files(two)) == (version, before)
    two.merge_source(source_of(COLUMNS, [upsert(3, id=3, item="c"), upsert(3, 1, id=2, item="B")]))

    assert items_in(two) == [(1, "a"), (2, "B"), (3, "c")]
