"""Unsupported table features: finds features that a Delta table requires and that delta-rs (1.6) does not support."""

from __future__ import annotations

import re
from typing import Final

from deltalake import DeltaTable

WRITTEN: Final = frozenset(
    {
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "columnMapping",
        "deletionVectors",
        "generatedColumns",
        "invariants",
        "timestampNtz",
        "v2Checkpoint",
        "variantType",
        "variantType-preview",
    }
)
"""The table features that delta-rs supports, by their names in the Delta protocol."""
NAMED: Final = re.compile(
    r"Unsupported table features required: \[([^\]]+)\]"  # a commit or a scan of delta-rs
    r"|Feature '([^']+)' is not supported"  # its kernel, when a table is opened
)
"""The errors in which delta-rs names unsupported features."""
_IDENTITY: Final = 6
"""Writer version of the Delta protocol that requires all features up to identity columns without naming them."""
_WIDENED: Final = "delta.typeChanges"
"""Metadata key of a column whose type was widened after files had been written."""


def unsupported_features(table: DeltaTable, *, to_read: bool = False) -> tuple[str, ...]:
    """Return the sorted names of a table's features that delta-rs cannot write.

    With `to_read`, return the names of the features that delta-rs cannot read.
    """
    protocol = table.protocol()
    required = set(protocol.reader_features or ())
    if not to_read:
        required.update(protocol.writer_features or ())
    if not to_read and protocol.min_writer_version == _IDENTITY:
        required.add("identityColumns")
    return tuple(sorted(required - WRITTEN))


def widened_columns(table: DeltaTable) -> tuple[str, ...]:
    """Return the names of columns whose type was widened, in the order of the table."""
    return tuple(field.name for field in table.schema().fields if _WIDENED in field.metadata)


def features_in_error(text: str) -> str | None:
    """Return the unsupported features that an error of delta-rs names; None if the error names none."""
    found = NAMED.search(text)
    return None if found is None else next(names for names in found.groups() if names)
