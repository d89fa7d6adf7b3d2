"""Both ways of a batch to a search server: the driver and the executors write the same documents and dead letters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

from cdc.catalog import Catalog
from cdc.config import EngineChoice, SearchSinkDefinition
from cdc.failpoint import VARIABLE, Abandoned
from cdc.log.reader import LogReader
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.fixtures.opensearch import SharedOpenSearch
from tests.fixtures.search_sinks import search_sink
from tests.pipelines.cold_log import log_writer
from tests.pipelines.shop_pipeline import FIGURES
from tests.pipelines.test_both_ways import appended_batches, parked_in, random_log, records_of

EXAMPLES = int(os.environ.get("CDC_BOTH_WAYS_EXAMPLES", "1"))
"""Random logs that are applied both ways."""
DYING = ("search_before_rows", "search_after_rows", "after_park", "search_before_refresh", "search_after_commit")
"""Where a driver dies that applies a batch on the executors; another one then applies it."""


@contextmanager
def loop_of(sink: SearchSinkDefinition, log: Path, spark: SparkSession | None) -> Iterator[SinkLoop]:
    """The loop of the sink; with Spark every row stays on the executors."""
    built, fold = build_sink(sink), RangeFolder(LogReader(log), sink.name, ("shop.*",))
    if spark is not None:
        fold.choice, fold.collected_rows = EngineChoice.SPARK, 0
    with Catalog.open(f"sqlite:///{log.parent}/catalog.db") as catalog:
        loop = SinkLoop(built, fold, CutRequests(catalog, "shop"), SinkFigures("shop", sink.name, FIGURES))
        loop.open()
        try:
            yield loop
        finally:
            loop.drain()
            built.close()


def documents(server: SharedOpenSearch, loop: SinkLoop) -> dict[str, dict[str, Any]]:
    """Return topic → id → version and source of every document, those that searches do not see included."""
    written: dict[str, dict[str, Any]] = {}
    for table in loop.record.tables.values():
        if table.target:
            httpx.post(f"{server.url}/{table.target}/_refresh").raise_for_status()
            body = {"size": 1_000, "version": True}
            hits = httpx.post(f"{server.url}/{table.target}/_search", json=body).raise_for_status().json()["hits"]
            written[table.topic] = {hit["_id"]: (hit["_version"], hit["_source"]) for hit in hits["hits"]}
    return written


def without_targets(loop: SinkLoop) -> list[Any]:
    return [(*record[:3], (record[3] or "").partition(" → ")[0], *record[4:]) for record in records_of(loop)]


# each example has indexes of its own on the server
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32 - 1))
def test_both_ways_have_the_same_documents_positions_and_dead_letters(
    spark: SparkSession, opensearch: SharedOpenSearch, seed: int
) -> None:
    random, example = Random(seed), uuid4().hex
    own = [replace(opensearch, prefix=f"{opensearch.prefix}{example}-{way}-") for way in ("here", "spark")]
    sinks = [search_sink(server, field_types={"plain": "date"}) for server in own]
    with TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        log = Path(root, "log")
        writer, waiting = log_writer(log), random_log(random)
        for end in appended_batches(random, writer, waiting):
            with loop_of(sinks[0], log, None) as here:
                here(None, end)
                expected = documents(opensearch, here), parked_in(here), without_targets(here)
            patch.setenv(VARIABLE, f"{random.choice(DYING)}:1:abandon")
            with loop_of(sinks[1], log, spark) as dying, suppress(Abandoned):
                dying(spark, end)
            patch.delenv(VARIABLE)
            with loop_of(sinks[1], log, spark) as there:
                there(spark, end)
                assert (documents(opensearch, there), parked_in(there), without_targets(there)) == expected
