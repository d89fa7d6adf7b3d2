"""Table storage: files by their relative paths, on a disk and in a bucket; a commit is created once, and completely."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from cdc.delta_protocol.table_storage import (
    BucketStorage,
    LocalStorage,
    TableStorage,
    storage_of,
)
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from tests.fixtures.s3 import KEY, KEY_ID, S3, Relay


def access(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Configure access to the server at a port, for delta-rs and for us."""
    said = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ALLOW_HTTP": "true", "REGION": "us-east-1"}
    for name, value in (said | {"ACCESS_KEY_ID": KEY_ID, "SECRET_ACCESS_KEY": KEY}).items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture(name="uri", params=["directory", "bucket"])
def _uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The directory of a table."""
    if request.param == "directory":
        return str(tmp_path)
    s3: S3 = request.getfixturevalue("s3")
    access(monkeypatch, s3.port)
    return str(s3.root())


@pytest.fixture(name="storage")
def _storage(uri: str) -> TableStorage:
    return storage_of(uri)


def names_in(folder: Path) -> list[str]:
    """Return the paths of all files, relative to the folder."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_storage_of_a_uri(tmp_path: Path) -> None:
    assert isinstance(storage_of(str(tmp_path)), LocalStorage)
    assert isinstance(storage_of("s3://bucket/lake/table"), BucketStorage)


def test_a_file_is_read_as_it_was_written_also_in_a_new_folder(storage: TableStorage) -> None:
    storage.write("vectors/deletion_vector_1.bin", b"content")
    storage.write("b.parquet", pa.py_buffer(b"buffer"))

    assert (storage.read("vectors/deletion_vector_1.bin"), storage.read("b.parquet")) == (b"content", b"buffer")
    assert [storage.exists(path) for path in ("b.parquet", "vectors/deletion_vector_1.bin", "c.parquet")] == [
        True,
        True,
        False,
    ]
    assert sorted(storage.list("vectors")) == ["vectors/deletion_vector_1.bin"]
    for missing in ("vectors/other.bin", "other/a.bin"):
        with pytest.raises(FileNotFoundError):
            storage.read(missing)


def test_a_large_file_is_written_in_parts_and_leaves_nothing_after_an_error(storage: TableStorage) -> None:
    random = np.random.default_rng(0)
    batches = [pa.record_batch({"n": random.integers(0, 1 << 60, 1 << 17)}) for _ in range(16)]
    with storage.open_new("large.parquet") as file, pq.ParquetWriter(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    with storage.open("large.parquet") as written:
        assert written.size() > 12 << 20
        assert pq.read_table(written).equals(pa.Table.from_batches(batches))
    with pytest.raises(InterruptedError), storage.open_new("stopped.parquet") as file:
        raise InterruptedError
    assert not storage.exists("stopped.parquet")


def test_a_file_is_replaced_and_leaves_no_draft(storage: TableStorage) -> None:
    storage.write("_delta_log/0.checkpoint.parquet", b"before")
    storage.replace("_delta_log/0.checkpoint.parquet", pa.py_buffer(b"after"))

    assert storage.read("_delta_log/0.checkpoint.parquet") == b"after"
    assert [path for path in storage.list("_delta_log") if path.endswith(".tmp")] == []


def test_a_file_that_exists_is_not_created_again_and_leaves_no_draft(storage: TableStorage) -> None:
    storage.write("_delta_log/0.json", b"before")
    storage.create("_delta_log/1.json", b"first")
    for path in ("_delta_log/0.json", "_delta_log/1.json"):
        with pytest.raises(FileExistsError):
            storage.create(path, b"second")

    assert (storage.read("_delta_log/0.json"), storage.read("_delta_log/1.json")) == (b"before", b"first")
    assert sorted(storage.list("_delta_log")) == ["_delta_log/0.json", "_delta_log/1.json"]


def test_one_of_many_creators_wins(storage: TableStorage) -> None:
    storage.write("_delta_log/0.json", b"")

    def created(number: int) -> bool:
        try:
            storage.create("_delta_log/1.json", str(number).encode() * 1_000)
        except FileExistsError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        winners = [number for number, won in enumerate(pool.map(created, range(8))) if won]

    assert len(winners) == 1
    assert storage.read("_delta_log/1.json") == str(winners[0]).encode() * 1_000


def test_a_file_that_is_being_created_is_not_seen_before_it_is_complete(tmp_path: Path) -> None:
    storage, content, sizes = LocalStorage(tmp_path), bytes(8 << 20), set[int]()

    def create_all() -> None:
        for number in range(5):
            storage.create(str(number), content)

    with ThreadPoolExecutor(1) as pool:
        created = pool.submit(create_all)
        while not created.done():
            present = [path for path in (tmp_path / str(number) for number in range(5)) if path.exists()]
            sizes |= {path.stat().st_size for path in present}

    created.result()
    assert sizes <= {len(content)}


def test_a_file_in_a_missing_folder_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LocalStorage(tmp_path).create("_delta_log/commit.json", b"content")

    assert names_in(tmp_path) == []


def test_a_created_file_whose_reply_is_lost_is_our_own(relay: Relay, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    root = s3.root()
    access(monkeypatch, relay.port)
    storage = storage_of(str(root))
    fault = relay.fault(r"PUT .*1\.json", 500)
    fault.kept = True
    storage.create("_delta_log/1.json", b"mine")
    assert fault.done == 1
    with pytest.raises(FileExistsError):
        storage.create("_delta_log/1.json", b"other")

    assert storage.read("_delta_log/1.json") == b"mine"
    assert [request for request in relay.conditional if "1.json" in request] != []


def test_the_files_of_a_folder_are_listed(storage: TableStorage) -> None:
    storage.write("_delta_log/0.json", b"")
    storage.write("b.parquet", b"")

    assert list(storage.list("_delta_log")) == ["_delta_log/0.json"]
    assert list(storage.list("missing")) == []


def test_folders_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / "_delta_log" / "_sidecars").mkdir(parents=True)
    assert list(LocalStorage(tmp_path).list("_delta_log")) == []


def test_pyarrow_opens_the_files_that_delta_rs_wrote_into_partitions(uri: str, storage: TableStorage) -> None:
    parts = ["a b", "ü/%", "x=1", "50%25", "plain"]
    write_deltalake(uri, pa.table({"n": range(5), "p": parts}), partition_by=["p"])
    found = {}
    for file in LiveFiles.read(storage).by_path.values():
        with storage.open(file.path) as opened:
            found[file.add["partitionValues"]["p"]] = pq.ParquetFile(opened).read().to_pylist()

    assert found == {part: [{"n": number}] for number, part in enumerate(parts)}
