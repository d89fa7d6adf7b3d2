"""Random keys: what a batch of 1,000 of them costs in a large target that is kept in another way than usual."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cdc.config import SinkRule
from cdc.config.transform import Transform
from pipelines.sinks.delta.settings import Writer
from tests.benchmarks.apply_input import TOPIC
from tests.benchmarks.apply_large import PEER_BATCHES, Kind, chosen, filled, median
from tests.benchmarks.figures import Figure

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BUCKET_ROWS = 10_000
"""Of one bucket: with as many buckets as a batch has keys each would be written again by it."""
KINDS = ("deletion_vectors", "bucketed")


def figures() -> dict[str, Figure]:
    """What is measured here."""
    return {
        **{f"random.{kind}": Figure("s") for kind in KINDS},
        **{f"random_written_mib.{kind}": Figure("MiB") for kind in KINDS},
        **{f"rows_differing.{kind}": Figure("rows", at_most=0, in_every_run=True) for kind in KINDS},
    }


def measure(session: SparkSession, random: np.random.Generator, rows: int, noted: dict[str, Figure]) -> None:
    """Batches into a target of so many rows of each kind; the first batch of each does not count."""
    for name, kind in zip(KINDS, _kinds(session, rows), strict=True):
        with filled(rows, kind) as target:
            target.apply(chosen(random, 0, rows))
            cost = median(target.apply(chosen(random, 0, rows)) for _ in range(PEER_BATCHES))
            noted[f"random.{name}"].values.append(cost.seconds)
            noted[f"random_written_mib.{name}"].values.append(cost.mib)
            noted[f"rows_differing.{name}"].values.append(target.differing())


def _kinds(session: SparkSession, rows: int) -> tuple[Kind, Kind]:
    """As KINDS."""
    buckets = max(1, rows // BUCKET_ROWS)
    vectors = SinkRule(match=TOPIC, properties={"delta.enableDeletionVectors": "true"})
    computed = Transform(computed={"bucket": f"CAST(id % {buckets} AS INT)"})
    parted = SinkRule(match=TOPIC, transform=computed, partition_by=("bucket",))
    return (
        Kind(Writer.SPARK, (vectors,), session),
        Kind(Writer.COPY_ON_WRITE, (parted,), session, lambda ids: ids % buckets),
    )
