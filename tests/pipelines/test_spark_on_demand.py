"""The start of Spark on demand: once, at the first request, and its error for everybody who asks."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.errors import SparkUnavailable
from pipelines.spark_on_demand import SparkOnDemand


class Start:
    """A start whose end the test decides; counts how often it began and whether the session was stopped."""

    def __init__(self) -> None:
        self.begun, self.stopped = 0, 0
        self.session: Future[Any] = Future()
        self.spark = SparkOnDemand(self._begin)

    def _begin(self) -> Future[Any]:
        self.begun += 1
        return self.session

    def stop(self) -> None:
        self.stopped += 1


def test_nothing_starts_before_a_request_and_nothing_is_stopped() -> None:
    start = Start()

    assert start.spark.available is None
    assert start.spark.error is None
    start.spark.stop()
    with pytest.raises(SparkUnavailable, match="ends"):
        start.spark.session("a compaction that was about to begin")
    assert (start.begun, start.stopped) == (0, 0)


def test_requests_start_one_session() -> None:
    start = Start()
    session = SimpleNamespace(stop=start.stop)

    start.spark.request("a large range")
    assert start.spark.available is None
    start.session.set_result(session)
    start.spark.request("a rule")

    assert start.spark.available is session
    assert start.spark.session("a compaction") is session
    assert start.begun == 1
    start.spark.stop()
    assert start.stopped == 1


def test_a_start_that_fails_says_why_to_everybody() -> None:
    start = Start()
    start.spark.request("a large range")
    start.session.set_exception(SparkUnavailable("no Java"))

    assert start.spark.available is None
    assert isinstance(start.spark.error, SparkUnavailable)
    with pytest.raises(SparkUnavailable, match="no Java"):
        start.spark.session("a rule")
    start.spark.stop()
