"""Delta tables with table features that another client added, as by ALTER TABLE."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Final

from deltalake import DeltaTable

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
