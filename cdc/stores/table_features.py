"""Table features: what a Delta table asks of who reads or writes it, and which of that delta-rs (1.6) cannot do."""

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
"""What delta-rs writes, by the protocol's names; a feature that is not here it may not even read."""
NAMED: Final = re.compile(
    r"Unsupported table features required: \[([^\]]+)\]"  # a commit or a scan of delta-rs
    r"|Feature '([^']+)' is not supported"  # its kernel, when a table is opened
)
"""How delta-rs says which features it does not know."""
_IDENTITY: Final = 6
"""Writer version of the protocol before features had names: all up to identity columns."""
_WIDENED: Final = "delta.typeChanges"
"""In the metadata of a column whose type was widened after files had been written."""


def lacking(table: DeltaTable, *, to_read: bool = False) -> tuple[str, ...]:
    """The features that a table asks for and delta-rs does not write, sorted; to_read: those that it does not read."""
    protocol = table.protocol()
    asked = set(protocol.reader_features or ())
    if not to_read:
        asked.update(protocol.writer_features or ())
    if not to_read and protocol.min_writer_version == _IDENTITY:
        asked.add("identityColumns")
    return tuple(sorted(asked - WRITTEN))


def widened(table: DeltaTable) -> tuple[str, ...]:
    """The columns whose type was widened, in the table's order."""
    return tuple(field.name for field in table.schema().fields if _WIDENED in field.metadata)


def named_in(text: str) -> str | None:
    """The features that an error of delta-rs names, as it spells them; None: it is about something else."""
    found = NAMED.search(text)
    return None if found is None else next(names for names in found.groups() if names)
