"""Table features that delta-rs writes and reads, checked with delta-rs itself."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import DeltaError

from cdc.targets.unsupported_table_features import WRITTEN, features_in_error, unsupported_features
from tests.pipelines.sinks.added_features import add_features, commit

OTHERS = (
    "allowColumnDefaults",
    "checkpointProtection",
    "clustering",
    "domainMetadata",
    "icebergCompatV2",
    "identityColumns",
    "inCommitTimestamp",
    "materializePartitionColumns",
    "rowTracking",
    "typeWidening",
    "vacuumProtocolCheck",
    "variantShredding-preview",
)


@pytest.mark.parametrize("feature", [*sorted(WRITTEN), *OTHERS])
def test_a_feature_is_known_as_written_where_delta_rs_writes_it(tmp_path: Path, feature: str) -> None:
    uri = str(tmp_path / "table")
    write_deltalake(uri, pa.table({"id": [1, 2]}))
    add_features(uri, [feature])
    table = DeltaTable(uri)
    try:
        pa.table(table.scan())
        table.delete("id = 1")
        written = True
    except DeltaError:
        written = False

    assert unsupported_features(DeltaTable(uri)) == (() if written else (feature,))


def test_a_protocol_from_before_features_asks_for_identity_columns_from_six_on(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    write_deltalake(uri, pa.table({"id": [1, 2]}))
    for version, asked in ((5, ()), (6, ("identityColumns",))):
        commit(uri, {"protocol": {"minReaderVersion": 2, "minWriterVersion": version}})
        assert unsupported_features(DeltaTable(uri)) == asked


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Unsupported table features required: [RowTracking, Clustering]", "RowTracking, Clustering"),
        ("Kernel error: Feature 'typeWidening' is not supported", "typeWidening"),
        ("No such file or directory", None),
    ],
)
def test_the_features_in_an_error_of_delta_rs_are_found(text: str, expected: str | None) -> None:
    assert features_in_error(text) == expected
