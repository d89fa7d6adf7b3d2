"""Two readers on one source: one reads, the other waits; one that was stopped meanwhile cannot write any more."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest

from cdc.catalog import Catalog
from cdc.demo.shop_workload import Workload
from cdc.errors import SlotInUse
from cdc.metrics import RECONNECTS
from cdc.postgres.connection import connect
from tests.faults.test_kill_reader import Oracle, assert_exact, prepare
from tests.fixtures.forked import Forked
from tests.fixtures.pipeline import Pipeline, delete_old_orders

IMPATIENT = "?options=-c%20wal_sender_timeout%3D5s"
"""The server ends the stream of a reader that is silent for so long."""
ASKED = 7
"""Times that the waiting reader was turned away: it has waited for some seconds, as a spare one has for days."""
TAKEN_OVER_WITHIN = 10.0
"""Seconds from the first reader's last sign of life."""


@pytest.fixture(name="workload")
def _workload(pipeline: Pipeline) -> Iterator[Workload]:
    prepare(pipeline)
    delete_old_orders(pipeline.dsn)
    workload = Workload(pipeline.dsn, rate=40.0, seed=11)
    yield workload
    workload.stop()


def holder(pipeline: Pipeline) -> int | None:
    """Process of the server that streams to whoever holds the slot."""
    query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    with connect(pipeline.dsn) as conn:
        found = conn.execute(query, [f"cdc_{pipeline.name}"]).fetchone()
    return None if found is None else found[0]


def attempts(pipeline: Pipeline, reader: Forked) -> float:
    """How often a reader has tried again, as it reports."""
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        figures = [found.figures for found in catalog.processes.ls(pipeline.name) if found.pid == reader.pid]
    return max((value for all_ in figures for name, _, value in all_ if name == RECONNECTS.name), default=0)


@pytest.mark.slow
def test_a_second_reader_waits_and_takes_over_when_the_first_ends(pipeline: Pipeline, workload: Workload) -> None:
    oracle = Oracle(pipeline.dsn, pipeline.name)
    first = pipeline.reader()
    pipeline.wait_for_copy()
    workload.start()
    pipeline.wait(lambda: holder(pipeline) is not None, "the first reader holds the slot")
    held = holder(pipeline)
    second = pipeline.reader()
    pipeline.wait(lambda: "CDC-2101" in pipeline.output(), "the second reader says who holds the slot")

    assert second.poll() is None
    assert holder(pipeline) == held
    first.send_signal(signal.SIGTERM)
    assert first.wait(30) == 0
    pipeline.wait(lambda: holder(pipeline) not in {None, held}, "the second reader holds the slot")
    pipeline.wait_for_more(workload, 20)
    workload.stop()
    assert_exact(pipeline, oracle)


def test_a_reader_that_was_stopped_while_another_took_over_writes_nothing_more(
    pipeline: Pipeline, workload: Workload
) -> None:
    oracle = Oracle(pipeline.dsn, pipeline.name)
    first = pipeline.reader()
    pipeline.wait_for_copy()
    workload.start()
    pipeline.wait_for_more(workload, 10)
    first.send_signal(signal.SIGSTOP)
    with connect(pipeline.dsn) as conn:  # what wal_sender_timeout does after a minute
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", [holder(pipeline)])
    second = pipeline.reader()
    pipeline.wait(lambda: holder(pipeline) is not None, "the second reader holds the slot")
    taken = pipeline.durable()
    pipeline.wait(lambda: pipeline.durable() > taken, "the second reader writes")

    first.send_signal(signal.SIGCONT)
    pipeline.wait_for_more(workload, 20)
    assert second.poll() is None
    workload.stop()
    assert_exact(pipeline, oracle)


@pytest.mark.parametrize("ended", [pytest.param(signal.SIGSTOP, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_reader_that_has_waited_long_takes_over_within_ten_seconds(
    pipeline: Pipeline, workload: Workload, ended: signal.Signals
) -> None:
    oracle = Oracle(pipeline.dsn, pipeline.name)
    pipeline.dsn += IMPATIENT
    first = pipeline.reader()
    pipeline.wait_for_copy()
    pipeline.wait(lambda: holder(pipeline) is not None, "the first reader at the slot")
    before = holder(pipeline)
    second = pipeline.reader()
    pipeline.wait(lambda: attempts(pipeline, second) >= ASKED, "a reader that waits")
    assert pipeline.output().count(SlotInUse.code) == 1
    workload.start()
    pipeline.wait_for_more(workload, 10)

    first.send_signal(ended)
    began, durable = time.monotonic(), pipeline.durable()
    pipeline.wait(lambda: holder(pipeline) not in {None, before}, "the second reader at the slot", every=0.05)
    pipeline.wait(lambda: pipeline.durable() > durable, "the second reader writes", every=0.05)
    assert time.monotonic() - began < TAKEN_OVER_WITHIN
    if ended is signal.SIGSTOP:
        first.send_signal(signal.SIGCONT)
        pipeline.wait_for_more(workload, 50)
    assert second.poll() is None
    workload.stop()
    assert_exact(pipeline, oracle)
