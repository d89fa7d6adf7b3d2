"""Table features: what a Delta table asks of who writes it, and which of that delta-rs (1.6) cannot do.

Targets are made with features that both writers know. ALTER TABLE may give one more, and no commit of delta-rs goes
through from then on: it is Spark's to write, or it stops alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from cdc.errors import TargetUnfit

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
_IDENTITY: Final = 6
"""Writer version of the protocol before features had names: all up to identity columns."""
AWAY: Final = "move the table away and build it anew: 'cdc replay SINK --tables TABLE'"
BY_SPARK: Final = f"let Spark write it (writer 'auto' or 'spark', and the Delta jars), or {AWAY}"
_REFUSED: Final = re.compile(
    r"Unsupported table features required: \[([^\]]+)\]"  # a commit or a scan of delta-rs
    r"|Feature '([^']+)' is not supported"  # its kernel, when a table is opened
    r"|that are unsupported by Delta Lake \"[^\"]*\": ([\w, -]+)"  # Spark
    r"|loading a (catalog-managed) table"
)
_APPEND_ONLY: Final = re.compile(r"append-only|APPEND_ONLY")


def lacking(table: DeltaTable, *, to_read: bool = False) -> tuple[str, ...]:
    """The features that a table asks for and delta-rs does not write, sorted; to_read: those that it does not read."""
    protocol = table.protocol()
    asked = set(protocol.reader_features or ())
    if not to_read:
        asked.update(protocol.writer_features or ())
    if not to_read and protocol.min_writer_version == _IDENTITY:
        asked.add("identityColumns")
    return tuple(sorted(asked - WRITTEN))


def unsupported(uri: str, features: tuple[str, ...], told: str = "", *, remedy: str = BY_SPARK) -> TargetUnfit:
    """The error of a target that asks for features; told: what of it nobody does."""
    names = ", ".join(map(repr, features))
    return TargetUnfit(
        f"target {uri!r} was given table features that delta-rs does not write: {names}{told and f'; {told}'}",
        remedy=remedy,
    )


@contextmanager
def asking(uri: str) -> Iterator[None]:
    """Raise TargetUnfit for what a target's protocol makes a writer or a reader refuse inside of the block."""
    try:
        yield
    except (DeltaError, Py4JJavaError, PySparkException) as exc:
        if (error := _refusal(uri, str(exc))) is None:
            raise
        raise error from exc


def _refusal(uri: str, text: str) -> TargetUnfit | None:
    if found := _REFUSED.search(text):
        features = next(names for names in found.groups() if names)
        return TargetUnfit(f"target {uri!r} was given table features that its writer does not know: {features}")
    if _APPEND_ONLY.search(text):
        return TargetUnfit(
            f"target {uri!r} was made append-only (delta.appendOnly), and rows of it change",
            remedy="set delta.appendOnly to false by ALTER TABLE … SET TBLPROPERTIES and start again",
        )
    return None
