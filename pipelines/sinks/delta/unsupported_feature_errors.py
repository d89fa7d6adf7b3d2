"""Errors for features of a Delta table that the writer of a target does not support.

cdc creates targets with features that delta-rs and Spark both support. Another client may add a feature that delta-rs
cannot write. From then on Spark writes the target. Without Spark, only the table of this target stops.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from deltalake.exceptions import DeltaError
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from cdc.errors import TargetUnusable
from cdc.targets.unsupported_table_features import NAMED

MOVE_AND_REBUILD: Final = "move the target to another directory, then run 'cdc replay SINK --tables TABLE'"
BY_SPARK: Final = f"set writer to 'auto' or 'spark' and provide the Delta jars; or {MOVE_AND_REBUILD}"
_REFUSED: Final = re.compile(
    rf"{NAMED.pattern}"
    r"|that are unsupported by Delta Lake \"[^\"]*\": ([\w, -]+)"  # Spark
    r"|loading a (catalog-managed) table"
)
_APPEND_ONLY: Final = re.compile(r"append-only|APPEND_ONLY")


def unsupported(uri: str, features: tuple[str, ...], operation: str = "", *, remedy: str = BY_SPARK) -> TargetUnusable:
    """Make the error for a target with features that delta-rs does not write.

    operation: a clause that is added to the message; it names what cannot be done because of the features.
    """
    names = ", ".join(map(repr, features))
    return TargetUnusable(
        f"target {uri!r} has table features that delta-rs does not write ({names})" + (operation and f"; {operation}"),
        remedy=remedy,
    )


def only_spark_writes(uri: str, reason: str) -> TargetUnusable:
    """Make the error for a target that only Spark can write. reason: why the driver cannot, as a clause."""
    return TargetUnusable(f"the driver cannot write target {uri!r}: {reason}", remedy=BY_SPARK)


@contextmanager
def translate_refusals(uri: str) -> Iterator[None]:
    """Raise TargetUnusable if delta-rs or Spark refuses the table features of the target at `uri` during the block."""
    try:
        yield
    except (DeltaError, Py4JJavaError, PySparkException) as exc:
        if (error := _refusal(uri, str(exc))) is None:
            raise
        raise error from exc


def _refusal(uri: str, text: str) -> TargetUnusable | None:
    if found := _REFUSED.search(text):
        features = next(names for names in found.groups() if names)
        return TargetUnusable(f"target {uri!r} has table features that its writer does not support: {features}")
    if _APPEND_ONLY.search(text):
        return TargetUnusable(
            f"target {uri!r} is append-only (delta.appendOnly), but the sink must change or delete its rows",
            remedy="set delta.appendOnly to false with ALTER TABLE … SET TBLPROPERTIES, then restart the apply process",
        )
    return None
