"""A filled sink, the rows of its target, and table features that another client adds to it, as by ALTER TABLE."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from cdc.targets.published_record import Published
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import batch, put

LOG: Final = "log-1"

BY_READERS: Final = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantShredding-preview",
        "variantType",
        "variantType-preview",
        "unheard",
    }
)
"""Features that readers have to know as well."""


def commit(uri: str, *actions: dict[str, Any]) -> int:
    """Commit actions as they are; the version."""
    version = DeltaTable(uri).version() + 1
    said = [{"commitInfo": {"operation": "SET TBLPROPERTIES", "timestamp": 0}}, *actions]
    (Path(uri) / "_delta_log" / f"{version:020d}.json").write_text("\n".join(map(json.dumps, said)))
    return version


def add_features(uri: str, features: Collection[str]) -> int:
    """Have a table ask for these features and for no others; the version."""
    of_readers = sorted(BY_READERS & set(features))
    said = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": of_readers}
    return commit(uri, {"protocol": {**said, "writerFeatures": sorted(features)}})


def sink_settings(folder: Path, writer: Writer = Writer.COPY_ON_WRITE) -> DeltaSettings:
    """The settings of a sink with its targets in the folder."""
    return DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", writer)


def filled_sink(folder: Path, writer: Writer = Writer.COPY_ON_WRITE) -> tuple[DeltaSink, str]:
    """An open sink whose target of shop.orders has three published rows, and the path of the target."""
    sink = DeltaSink(sink_settings(folder, writer))
    sink.open(LOG)
    record = sink.apply(batch([put(1, "a", 10), put(2, "b", 11), put(3, "c", 12)], 0, 20, generation=1))
    sink.publish(Published(20, 0, {record.relation: record}))
    return sink, record.target


def items_by_id(uri: str) -> dict[int, str]:
    """Return the items of a target of shop.orders by id, as delta-rs reads them; no id may occur twice."""
    found = pa.table(DeltaTable(uri).scan(columns=["id", "item"]))
    assert len(set(found["id"].to_pylist())) == found.num_rows
    return dict(zip(found["id"].to_pylist(), found["item"].to_pylist(), strict=True))
