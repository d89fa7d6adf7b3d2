"""Properties of Delta tables: what the own commits contain, compared with those of delta-rs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.schema import PrimitiveType

from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.table_properties import TableMetadata, create_table, set_properties
from pipelines.sinks.delta.target_layout import DELETION_VECTORS
from tests.contracts.folded import ORDERS, batch, column, gone, put
from tests.pipelines.sinks.added_features import add_features

VECTORS: Final = {DELETION_VECTORS: "true"}
COLUMNS: Final = pa.schema(
    [
        pa.field("id", pa.int64(), metadata={"cdc.column_id": "1"}),
        pa.field("ü \"'", pa.decimal128(10, 2)),
        pa.field("part", pa.string()),
    ]
)
AT: Final = pa.field("at", pa.timestamp("us"))
OPTIONS: Final[dict[str, Any]] = {"name": "n", "description": "d", "partition_by": ["part"]}


def features(uri: str) -> set[str]:
    """Return the features that a reader or a writer of the table needs."""
    protocol = DeltaTable(uri).protocol()
    return {*(protocol.reader_features or ()), *(protocol.writer_features or ())}


def metadata_actions(uri: str) -> list[dict[str, Any]]:
    """Return all `metaData` actions, without their ids and times."""
    files = sorted(Path(uri, "_delta_log").glob("*.json"))
    actions = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    found = [action["metaData"] for action in actions if "metaData" in action]
    return [{name: value for name, value in action.items() if name not in {"id", "createdTime"}} for action in found]


@pytest.mark.parametrize("columns", [COLUMNS, COLUMNS.append(AT)], ids=["plain", "timestamp"])
@pytest.mark.parametrize("configuration", [{"cdc.a": "ü"}, {"cdc.a": "ü"} | VECTORS], ids=["plain", "vectors"])
def test_a_table_is_created_and_changed_as_by_delta_rs_but_for_one_feature(
    columns: pa.Schema, configuration: dict[str, str], tmp_path: Path
) -> None:
    mine, other = str(tmp_path / "mine"), str(tmp_path / "other")
    created, _ = create_table(mine, columns, configuration=configuration, **OPTIONS)
    table = DeltaTable(mine)
    assert created == TableMetadata.of(table)
    theirs = DeltaTable.create(other, columns, configuration=configuration, raise_if_key_not_exists=False, **OPTIONS)
    for properties in ({"cdc.b": "1", "cdc.a": "2"}, {"delta.logRetentionDuration": "interval 3 days"}):
        set_properties(mine, table, properties)
        theirs.alter.set_table_properties(properties, raise_if_not_exists=False)

    assert metadata_actions(mine) == metadata_actions(other)
    assert features(mine) == features(other) - {"variantType"} - ({"appendOnly", "invariants"} - features(mine))
    assert (table.version(), DeltaTable(mine).metadata().id) == (2, table.metadata().id)


def test_a_target_has_no_features_that_it_does_not_need(tmp_path: Path) -> None:
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}", Writer.INDEXED))
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10), put(2, "b", 11)], 0, 20, generation=1))
    wider = replace(ORDERS, columns=(*ORDERS.columns, column(4, "note")))
    uri = sink.apply(batch([put(1, "A", 30), gone(2, 31)], 20, 40, wider)).target
    sink.close()

    assert features(uri) == {"deletionVectors", "appendOnly", "invariants"}
    assert pl.read_delta(uri).select("id", "item", "note").rows() == [(1, "A", None)]


def test_a_table_gets_deletion_vectors_later(tmp_path: Path) -> None:
    create_table(str(tmp_path), COLUMNS)
    table = DeltaTable(str(tmp_path))
    set_properties(str(tmp_path), table, VECTORS)
    assert features(str(tmp_path)) == {"deletionVectors"}
    assert table.metadata().configuration == VECTORS


def test_what_another_client_changed_stays(tmp_path: Path) -> None:
    uri = str(tmp_path)
    create_table(uri, COLUMNS)
    table = DeltaTable(uri)
    DeltaTable(uri).alter.set_table_properties({"theirs": "1"}, raise_if_not_exists=False)
    DeltaTable(uri).alter.add_columns(Field("more", PrimitiveType("string")))
    set_properties(uri, table, {"mine": "2"})

    found = DeltaTable(uri)
    assert found.metadata().configuration == {"theirs": "1", "mine": "2"}
    assert [field.name for field in found.schema().fields] == [*COLUMNS.names, "more"]
    assert table.version() == found.version() == 3


def test_an_existing_table_is_not_created_again(tmp_path: Path) -> None:
    create_table(str(tmp_path), COLUMNS)
    with pytest.raises(CommitFailedError, match="another client created a table"):
        create_table(str(tmp_path), COLUMNS)


def test_a_table_with_unknown_features_is_not_changed(tmp_path: Path) -> None:
    uri = str(tmp_path)
    create_table(uri, COLUMNS)
    add_features(uri, {"rowTracking", "domainMetadata"})
    version = DeltaTable(uri).version()
    with pytest.raises(DeltaError, match="RowTracking"):
        set_properties(uri, DeltaTable(uri), {"mine": "2"})
    assert DeltaTable(uri).version() == version
