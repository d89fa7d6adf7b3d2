"""The watch: the log is looked at for who asks, and whatever its storage does, nobody waits for it."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.position import Position
from cdc.service.log_sampler import LogSampler
from cdc.service.log_status_records import LogState, LogStatus
from tests.fixtures.s3 import KEY, S3, Relay
from tests.fixtures.waiting import until
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.log.simple_compaction import compact

SOON = 30.0


@pytest.fixture
def root(tmp_path: Path) -> Path:
    writer = LogWriter.open(tmp_path / "log", IDENTITY, LIMITS)
    writer.commit(writer.stage(table(row(10))), info(10))
    return tmp_path / "log"


def seen(log: LogSampler) -> LogStatus:
    found = log.wait(SOON)
    assert found is not None
    return found


def test_nobody_who_asks_for_the_latest_waits_for_a_look(root: Path) -> None:
    log = LogSampler(root)
    assert log.current is None
    until(lambda: log.refresh() is not None, "the first look to end")
    assert seen(log).durable == "0/A"


def test_of_many_who_ask_at_once_one_looks(root: Path) -> None:
    log = LogSampler(root)
    first = seen(log)
    assert all(log.refresh() is first for _ in range(100))


def test_a_log_that_is_taken_away_is_no_longer_shown(root: Path) -> None:
    log = LogSampler(root, every=0.0)
    assert seen(log).state is LogState.READ
    shutil.rmtree(root)

    def shown() -> bool:
        found = log.refresh()
        return found is not None and found.state is LogState.ABSENT

    until(shown, "the log to be told as absent", seconds=SOON)


def test_a_storage_that_does_not_answer_is_told_after_the_wait(root: Path) -> None:
    (root / "_consumers").mkdir()
    pipe = root / "_consumers" / "lake.json"
    os.mkfifo(pipe)  # whoever opens it to read waits until somebody writes
    log = LogSampler(root, "shop.yaml")
    found = log.wait(0.2)
    assert found is not None
    assert (found.state, found.segment_count) == (LogState.UNREADABLE, 0)
    assert "has not answered" in found.problems[0].message
    assert "'cdc log ls -c shop.yaml'" in found.problems[0].remedy
    with pipe.open("wb"):
        pass  # the look goes on, and finds a file that is empty
    pipe.unlink()
    assert seen(log).state is LogState.READ


@pytest.mark.slow  # an S3 server is started
def test_a_log_in_a_bucket_is_told_alike_and_a_store_that_is_away_with_its_own_words(s3: S3, relay: Relay) -> None:
    place = s3.root()
    writer = LogWriter.open(place, IDENTITY, SegmentLimits(size=1, age=3600.0))
    for position in (10, 20, 30):
        writer.commit(writer.stage(table(row(position))), info(position))
    compact(place, 20, merge=True)
    writer.trim([0], Position(10))
    consumers.register(place, Consumer("lake", "lake", Position(20), None, 1))
    log = LogSampler(replace(place, options=s3.root(port=relay.port).options), every=0.0)
    found = seen(log)
    assert (found.durable, found.horizon, found.oldest, found.problems) == ("0/1E", "0/14", "0/A", ())
    assert (found.segment_count, found.leaving_bytes != 0) == (2, True)
    assert [line.name for line in found.consumers] == ["lake"]
    assert not [request for request in relay.seen if ".parquet" in request]
    relay.fault(".", 403, times=1_000)
    away = seen(log)
    assert (away.state, away.problems[0].code) == (LogState.UNREADABLE, "CDC-4011")
    assert KEY not in str(away)
