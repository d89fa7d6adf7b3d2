"""Targets in a bucket: milliseconds of a batch of random keys by the indexed writer, next to delta-rs in the same run.

The server is moto, which answers one request at a time in some milliseconds. So most of the time is that of requests,
as with a real object store.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from pipelines.sinks.delta.settings import Writer
from tests.benchmarks.apply_large import Kind, chosen, filled
from tests.benchmarks.figures import Figure
from tests.fixtures.s3 import KEY, KEY_ID, s3_server

DIVISOR = 50
"""Divisor of the rows of the largest target."""
BATCHES, PEER_BATCHES = 20, 5


def figures() -> dict[str, Figure]:
    """Figures that `measure` fills."""
    return {
        "merge_ms.indexed.bucket_1m_1k": Figure("ms"),
        "merge_p90_ms.indexed.bucket_1m_1k": Figure("ms"),
        "vs_delta_rs_merge.bucket_1m_1k": Figure("ratio", at_least=1),
        "rows_differing.indexed.bucket_1m": Figure("rows", at_most=0, in_every_run=True),
    }


def measure(random: np.random.Generator, rows: int, found: dict[str, Figure]) -> None:
    """Measure batches of 1,000 keys in a target with a fiftieth of the rows."""
    count = rows // DIVISOR
    with _bucket() as uri:
        with filled(count, Kind(Writer.INDEXED, bucket_uri=f"{uri}/indexed")) as target:
            target.apply(chosen(random, 0, count))
            target.finish_index()
            ours = [target.apply(chosen(random, 0, count)).seconds for _ in range(BATCHES)]
            found["rows_differing.indexed.bucket_1m"].values.append(target.differing())
            target.close()
        with filled(count, Kind(Writer.COPY_ON_WRITE, bucket_uri=f"{uri}/peer")) as target:
            target.close()
            theirs = [target.merge_with_delta_rs(chosen(random, 0, count)).seconds for _ in range(PEER_BATCHES)]
    found["merge_ms.indexed.bucket_1m_1k"].values.append(float(np.median(ours)) * 1e3)
    found["merge_p90_ms.indexed.bucket_1m_1k"].values.append(float(np.quantile(ours, 0.9)) * 1e3)
    found["vs_delta_rs_merge.bucket_1m_1k"].values.append(float(np.median(theirs) / np.median(ours)))


@contextmanager
def _bucket() -> Iterator[str]:
    """Yield the URI of a new bucket, which delta-rs and the indexed writer reach through the environment."""
    with s3_server() as server:
        server.make("lake")
        access = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": KEY,
        }
        with pytest.MonkeyPatch.context() as environment:
            for name, value in access.items():
                environment.setenv(name, value)
            yield "s3://lake"
