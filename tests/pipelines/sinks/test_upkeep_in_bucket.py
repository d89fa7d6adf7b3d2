"""Upkeep of a Delta target in a bucket: what no kept cut needs goes there as well."""

from __future__ import annotations

import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cdc.target_names import published_uri
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.maintenance import TargetMaintenance, UpkeepSettings
from pipelines.sinks.delta.published_cuts_table import PublishedTable
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put
from tests.fixtures.s3 import KEY, KEY_ID, S3
from tests.pipelines.sinks.maintained_sink import Clock


@pytest.fixture(name="path")
def _path(s3: S3, monkeypatch: pytest.MonkeyPatch) -> str:
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    return f"{s3.root()}/{{schema}}/{{table}}"


@pytest.mark.slow
def test_in_a_bucket_what_no_kept_cut_needs_goes_and_the_kept_ones_stay(path: str) -> None:
    sink, clock = DeltaSink(DeltaSettings("lake", path, upkeep=UpkeepSettings(every=0))), Clock()
    sink.open("log-1")
    upkeep = TargetMaintenance(UpkeepSettings(every=1, vacuum_after=10), clock)
    for upto in (20, 40, 60):
        record = sink.apply(batch([put(1, str(upto), upto)], upto - 20, upto, generation=1 if upto == 20 else None))
        DeltaTable(record.target).create_checkpoint()
        sink.publish(Published(upto, upto, {ORDERS.relation: record}))
        target = DeltaTarget(record.target, DeltaTable(record.target))
        upkeep.turn(PublishedTable.open(published_uri(path), "log-1").cuts, {record.target: target})
    store = pafs.PyFileSystem(DeltaStorageHandler(record.target))
    kept = PublishedTable.open(published_uri(path), "log-1").cuts[1:]
    for _ in range(3):
        clock.now += 20
        upkeep.turn(kept, {record.target: target})

    names = [info.path for info in store.get_file_info(pafs.FileSelector("", recursive=True))]
    assert len([name for name in names if name.endswith(".parquet") and not name.startswith("_")]) == 2
    versions = [cut.record.versions[record.target] for cut in kept]
    assert [read_target(record.target, version).read_all()["item"].to_pylist() for version in versions] == [
        ["40"],
        ["60"],
    ]
    assert min(name for name in names if name.endswith(".checkpoint.parquet")).endswith(
        f"{versions[0]:020}.checkpoint.parquet"
    )
