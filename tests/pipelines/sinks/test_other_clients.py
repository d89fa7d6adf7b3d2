"""Another client writes to a Delta target while a batch is merged: the merge is made again, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from cdc.stores.lake import read_target
from pipelines.sinks.delta import DeltaSettings, DeltaSink
from pipelines.sinks.delta_table import DeltaTarget
from pipelines.sinks.sink import TableBatch
from tests.contracts.folded import batch, gone, put

Client = Callable[[DeltaTable], object]


class Disturbed(DeltaSink):
    """A sink to whose target another client writes after it was opened for a batch, and before the batch is merged."""

    disturb: Client | None = None
    attempts = 0

    def _bring(self, target: DeltaTarget, batch: TableBatch) -> None:
        self.attempts += 1
        if self.disturb is not None:
            doing, self.disturb = self.disturb, None
            doing(DeltaTable(target.uri))
        super()._bring(target, batch)


def optimize(table: DeltaTable) -> None:
    assert table.optimize.compact()["numFilesRemoved"] > 0


def cluster(table: DeltaTable) -> None:
    assert table.optimize.z_order(["id"])["numFilesRemoved"] > 0


def update(table: DeltaTable) -> None:
    assert table.update({"item": "'theirs'"}, predicate="id = 2")["num_updated_rows"] == 1


def update_the_same_row(table: DeltaTable) -> None:
    assert table.update({"item": "'theirs'"}, predicate="id = 1")["num_updated_rows"] == 1


def delete(table: DeltaTable) -> None:
    assert table.delete("id = 2")["num_deleted_rows"] == 1


def append(table: DeltaTable) -> None:
    row = pa.table(table.scan(predicate="id = 2"))
    write_deltalake(
        table, row.set_column(row.schema.get_field_index("id"), "id", pa.array([9], pa.int64())), mode="append"
    )


def optimize_and_vacuum(table: DeltaTable) -> None:
    optimize(table)
    assert table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False)


@pytest.mark.parametrize(
    ("client", "theirs"),
    [
        (optimize, {}),
        (cluster, {}),
        (optimize_and_vacuum, {}),
        (update, {2: "theirs"}),
        (update_the_same_row, {}),
        (delete, {2: None}),
        (append, {9: "b"}),
    ],
)
def test_what_another_client_and_the_batch_did_are_both_there(tmp_path: Path, client: Client, theirs: dict[int, str]):
    sink = Disturbed(DeltaSettings("lake", f"{tmp_path}/{{schema}}/{{table}}"))
    sink.open("log-1")
    sink.apply(batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20, generation=1))
    target = sink.apply(batch([put(4, "d", 30)], 20, 40)).target
    write_deltalake(target, pa.table(DeltaTable(target).scan(predicate="id = 4")), mode="append")  # two small files
    DeltaTable(target).delete("id = 4")
    sink.apply(batch([put(4, "d", 50)], 40, 60))
    later = batch([put(1, "A", 70), gone(3, 71), put(5, "e", 72)], 60, 80)
    sink.disturb, sink.attempts = client, 0
    try:
        record = sink.apply(later)
    except DeltaError:
        record = sink.apply(later)  # as the driver does, which opens the sink anew

    rows = read_target(record.target, record.version).read_all()
    found = dict(zip(rows["id"].to_pylist(), rows["item"].to_pylist(), strict=True))
    expected = {1: "A", 2: "b", 4: "d", 5: "e"} | theirs
    assert found == {key: item for key, item in expected.items() if item is not None}
    assert record.position == 80
    assert (sink.attempts > 1) == (client is not append)
