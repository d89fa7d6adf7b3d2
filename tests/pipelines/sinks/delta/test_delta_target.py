"""Delta target: changes of its columns, files that it describes, bytes that a merge wrote again, `txn` markers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError

from cdc.config import SchemaChanges
from cdc.delta_protocol.actions import txn_action
from cdc.errors import SchemaNotApplicable, TargetUnusable
from pipelines.sinks.delta.delta_target import (
    COLUMNS,
    ERASED,
    ROWS,
    DeltaTarget,
    TxnMarker,
    rewritten_bytes,
)
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.sinks.delta.target_layout import NewTarget
from pipelines.types.families import TypePolicy
from pipelines.types.typed_rows import target_schema
from tests.contracts.folded import ID, ORDERS, PRICE, batch, column, put
from tests.pipelines.sinks.added_features import commit
from tests.pipelines.sinks.test_delta_schema_changes import ARTICLE, having, publish, rows


def files(*bounds: tuple[int | None, int | None, int]) -> pa.Table:
    low, high, size = zip(*bounds, strict=True)
    return pa.table(
        {
            "path": [f"f{n}" for n in range(len(bounds))],
            "size_bytes": pa.array(size, pa.int64()),
            "min.id": pa.array(low, pa.int64()),
            "max.id": pa.array(high, pa.int64()),
        }
    )


FILES = files((0, 99, 1), (100, 199, 10), (150, 300, 100), (None, None, 1000))


def test_written_again_is_what_came_for_what_went() -> None:
    four, three, other = FILES, FILES.slice(1), files((0, 9, 7), (0, 9, 8)).slice(1)

    assert rewritten_bytes(four, four) == 0
    assert rewritten_bytes(three, four) == rewritten_bytes(four, three) == 0
    renamed = other.set_column(0, "path", pa.array(["new"]))
    assert rewritten_bytes(four, pa.concat_tables([three, renamed])) == 1
    assert rewritten_bytes(pa.concat_tables([four, renamed]), three) == 0
    assert rewritten_bytes(three, pa.concat_tables([four.slice(2), renamed])) == 8


def test_a_target_whose_features_forbid_a_rewrite_stops_alone(tmp_path):
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    record = sink.apply(batch([put(1, "a", 10)], 0, 20))
    DeltaTable(record.target).alter.set_table_properties({"delta.appendOnly": "true"})
    with pytest.raises(SchemaNotApplicable, match="table features that prevent these changes of its columns"):
        sink.apply(batch(None, 20, 40, having(ID, ARTICLE, PRICE)))


def test_a_rewrite_of_rows_that_another_hand_has_added_to_is_refused_and_done_again(tmp_path):
    sink = DeltaSink(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    record = publish(sink, sink.apply(batch([put(1, "a", 10)], 0, 20)))
    target, others = DeltaTarget.open(record.target), DeltaTable(record.target)
    assert target is not None
    row = pa.table(others.scan()).set_column(0, "id", pa.array([9], pa.int64()))
    write_deltalake(others, row, mode="append")
    renamed = having(ID, ARTICLE, PRICE)
    evolution = ColumnChange(
        target_schema(renamed, TypePolicy.EXACT), SchemaChanges.EVOLVE, replaced=False, topic="shop.orders"
    )
    with pytest.raises(CommitFailedError):
        target.evolve_columns(evolution, 40)
    record = sink.apply(batch([put(2, "b", 30)], 20, 40, renamed))

    assert rows(record) == {1: ("a", "1.00"), 2: ("b", "1.00"), 9: ("a", "1.00")}


def test_a_target_names_its_log_and_its_table(tmp_path: Path) -> None:
    columns = target_schema(ORDERS, TypePolicy.EXACT)
    created = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(ORDERS, columns))
    target = DeltaTarget.open(created.uri)
    assert target is not None
    target.check_identity("log-1", ORDERS)

    assert (target.relation, target.applied, target.is_untouched, target.is_complete) == (
        ORDERS.relation,
        None,
        True,
        False,
    )
    with pytest.raises(TargetUnusable, match="was written from log 'log-1': expected 'log-2'"):
        target.check_identity("log-2", ORDERS)
    with pytest.raises(SchemaNotApplicable, match="is now relation 9"):
        target.check_identity("log-1", replace(ORDERS, relation=9))
    target.complete_generation(5)
    assert target.is_complete
    assert DeltaTarget.open(f"{tmp_path}/other") is None


TYPE_OIDS = (
    16,
    17,
    21,
    23,
    114,
    700,
    701,
    1000,
    1007,
    1009,
    1043,
    1082,
    1083,
    1114,
    1184,
    1186,
    1231,
    1700,
    2950,
    3802,
)
WIDE = replace(
    ORDERS,
    columns=(*ORDERS.columns, *(column(n, f"c{n}", f"type {n}", oid=oid) for n, oid in enumerate(TYPE_OIDS, 10))),
)


def test_what_a_new_target_remembers_is_what_its_table_contains(tmp_path: Path) -> None:
    columns = target_schema(WIDE, TypePolicy.EXACT)
    created = DeltaTarget.create(str(tmp_path / "target"), "log-1", NewTarget(WIDE, columns, generation=5))
    opened = DeltaTarget.open(created.uri)
    assert opened is not None

    def known(target: DeltaTarget) -> list[object]:
        transactions = [target.transaction(suffix) for suffix in ("", ROWS, ERASED, COLUMNS)]
        return [target.version, target.metadata, target.all_columns, target.columns, target.files(), transactions]

    assert known(created) == known(opened)
    assert created.all_columns.equals(opened.all_columns, check_metadata=True)
    assert created.actions.equals(opened.actions.select(created.actions.column_names).cast(created.actions.schema))
    assert created.current._table is None, "delta-rs has not opened it"
    assert created.table.version() == 0


ONE_ROW = pa.table({"n": [1]})


def test_both_forms_of_a_marker_are_read_as_the_version_of_the_application(tmp_path: Path) -> None:
    uri = str(tmp_path)
    write_deltalake(uri, ONE_ROW, commit_properties=TxnMarker("first", 20).properties)
    commit(uri, txn_action("second", 1 << 40))

    table = DeltaTable(uri)
    assert (table.transaction_version("first"), table.transaction_version("second")) == (20, 1 << 40)


def test_a_later_marker_replaces_an_earlier_one_of_the_other_form(tmp_path: Path) -> None:
    uri = str(tmp_path)
    write_deltalake(uri, ONE_ROW, commit_properties=TxnMarker("app", 20).properties)
    commit(uri, txn_action("app", 40))
    assert DeltaTable(uri).transaction_version("app") == 40
    write_deltalake(uri, ONE_ROW, mode="append", commit_properties=TxnMarker("app", 60).properties)

    assert DeltaTable(uri).transaction_version("app") == 60
