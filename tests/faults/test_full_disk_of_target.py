"""A full disk at each of the files of a batch: nothing is half visible, and the batch is merged once there is room."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable
from structlog.testing import capture_logs

from cdc.errors import SinkUnavailable
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, gone, put
from tests.fixtures.disk import small_file_system
from tests.pipelines.sinks.added_features import items_by_id

OTHER = replace(ORDERS, relation=ORDERS.relation + 1, oid=ORDERS.oid + 1, name="returns")
FIRST = batch([put(number, "a", 10) for number in range(5000)], 0, 20)
SECOND = batch([put(1, "A", 30), gone(2, 31), put(5000, "new", 32)], 20, 40)
AFTER_FIRST = dict.fromkeys(range(5000), "a")
AFTER_SECOND = {number: item for number, item in AFTER_FIRST.items() if number != 2} | {1: "A", 5000: "new"}


def opened(folder: Path) -> DeltaSink:
    """Return a sink whose targets are in `lake`, with its indexes in `index`."""
    settings = DeltaSettings(
        "lake", f"{folder}/lake/{{schema}}/{{table}}", Writer.INDEXED, index_folder=f"{folder}/index"
    )
    sink = DeltaSink(settings)
    sink.open("log-1")
    return sink


@contextmanager
def full(place: Path) -> Iterator[None]:
    """Leave no room in a small file system."""
    ballast = place / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    yield
    ballast.unlink()


@pytest.mark.parametrize("part", ["", "_vectors", "_delta_log"], ids=["data file", "vectors", "commit"])
def test_a_batch_is_refused_as_a_whole_and_merged_once_there_is_room(part: str, tmp_path: Path) -> None:
    place = tmp_path / "lake/shop/orders" / part
    place.parent.mkdir(parents=True)
    with small_file_system(place):
        sink = opened(tmp_path)
        uri = sink.apply(FIRST).target
        version = DeltaTable(uri).version()
        with full(place):
            for _ in range(2):
                with pytest.raises(SinkUnavailable, match="No space left on device"):
                    sink.apply(SECOND)
            assert (items_by_id(uri), DeltaTable(uri).version()) == (AFTER_FIRST, version)
            other = sink.apply(replace(FIRST, schema=OTHER))
            assert items_by_id(other.target) == AFTER_FIRST
        sink.apply(SECOND)

        assert (items_by_id(uri), DeltaTable(uri).version()) == (AFTER_SECOND, version + 1)
        sink.close()


def test_batches_are_merged_while_the_disk_of_the_index_is_full(tmp_path: Path) -> None:
    with small_file_system(tmp_path / "index") as place:
        sink = opened(tmp_path)
        uri = sink.apply(FIRST).target
        with full(place), capture_logs() as logs:
            sink.apply(SECOND)
            sink.close()
            assert items_by_id(uri) == AFTER_SECOND
            sink = opened(tmp_path)
            sink.apply(batch([put(1, "AA", 50)], 40, 60))
            sink.close()
        assert {entry["event"].partition(";")[0] for entry in logs if entry["log_level"] == "warning"} == {
            "the key index of a target cannot be written"
        }
        assert items_by_id(uri) == AFTER_SECOND | {1: "AA"}
        sink = opened(tmp_path)
        sink.apply(batch([gone(1, 70)], 60, 80))
        sink.close()
        assert 1 not in items_by_id(uri)
