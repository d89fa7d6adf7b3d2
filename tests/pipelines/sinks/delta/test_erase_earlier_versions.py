"""Erasure of a target in a bucket: of what its rules hide nothing is left there either."""

from __future__ import annotations

import pyarrow.fs as pafs
import pytest
from deltalake import DeltaTable
from deltalake.fs import DeltaStorageHandler

from cdc.errors import SinkUnavailable
from cdc.targets.lake_reader import read_target
from pipelines.sinks.delta.erase_earlier_versions import erase_earlier, is_marked, mark_to_erase
from pipelines.sinks.delta.settings import DeltaSettings
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, put
from tests.fixtures.s3 import KEY, KEY_ID, S3


@pytest.mark.slow
def test_in_a_bucket_earlier_versions_go_with_their_files_and_commits(s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{s3.port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)
    sink = DeltaSink(DeltaSettings("lake", f"{s3.root()}/{{schema}}/{{table}}"))
    sink.open("log-1")
    first = sink.apply(batch([put(1, "canary7f3a9c", 20)], 0, 20, generation=1))
    mark_to_erase(DeltaTable(first.target))
    last = sink.apply(batch([put(1, "***", 40)], 20, 40))
    assert first.version is not None
    assert last.version is not None
    assert erase_earlier(last.target, last.version) == 1

    store = pafs.PyFileSystem(DeltaStorageHandler(last.target))
    infos = store.get_file_info(pafs.FileSelector("", recursive=True))
    names = [info.path for info in infos if info.type == pafs.FileType.File]
    assert [name for name in names if b"canary7f3a9c" in store.open_input_stream(name).read()] == []
    assert read_target(last.target, last.version).read_all()["item"].to_pylist() == ["***"]
    with pytest.raises(SinkUnavailable):
        read_target(first.target, first.version)
    assert not is_marked(DeltaTable(last.target))
