"""The start of Spark on demand: once, at the first request, and its error for everybody who asks."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdc.config import EngineChoice, load_definition
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


class WaitingThread(Executor):
    """A thread that begins nothing; counts what it is given."""

    def __init__(self) -> None:
        self.given = 0

    def submit(self, *_arguments: Any, **_named: Any) -> Future[Any]:
        self.given += 1
        return Future()


@pytest.mark.parametrize("engine", EngineChoice)
def test_the_session_starts_at_once_if_it_gets_every_batch(tmp_path: Path, engine: EngineChoice) -> None:
    jar, path = tmp_path / "delta.jar", tmp_path / "shop.yaml"
    jar.touch()
    path.write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: shop.*}]\n"
        f"log: {{path: '{tmp_path}/log'}}\nsinks: [{{type: delta, name: lake, path: '{tmp_path}/lake/{{table}}'}}]\n"
        f"spark: {{engine: {engine}, delta_jars: ['{jar}']}}\n"
    )
    thread = WaitingThread()
    spark = SparkOnDemand.of(load_definition(path), thread)
    assert thread.given == (engine is EngineChoice.SPARK)
    spark.request("a large range")
    assert thread.given == 1


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
