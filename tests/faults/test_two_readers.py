"""Two readers on one source: one reads, the other waits; one that was stopped meanwhile cannot write any more."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from cdc.demo.workload import Workload
from cdc.postgres.connection import connect
from tests.faults.test_kill_reader import Oracle, assert_exact, prepare
from tests.fixtures.pipeline import Pipeline


@pytest.fixture(name="workload")
def _workload(pipeline: Pipeline) -> Iterator[Workload]:
    prepare(pipeline)
    workload = Workload(pipeline.dsn, rate=300.0, seed=11)
    yield workload
    workload.stop()


def holder(pipeline: Pipeline) -> int | None:
    """Process of the server that streams to whoever holds the slot."""
    query = "SELECT active_pid FROM pg_replication_slots WHERE slot_name = %s"
    with connect(pipeline.dsn) as conn:
        found = conn.execute(query, [f"cdc_{pipeline.name}"]).fetchone()
    return None if found is None else found[0]


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
    pipeline.wait_for_more(workload, 20)
    first.send_signal(signal.SIGSTOP)
    with connect(pipeline.dsn) as conn:  # what wal_sender_timeout does after a minute
        conn.execute("SELECT pg_terminate_backend(%s, 5000)", [holder(pipeline)])
    second = pipeline.reader()
    pipeline.wait(lambda: holder(pipeline) is not None, "the second reader holds the slot")
    taken = pipeline.durable()
    pipeline.wait(lambda: pipeline.durable() > taken, "the second reader writes")

    first.send_signal(signal.SIGCONT)
    pipeline.wait_for_more(workload, 50)
    assert second.poll() is None
    workload.stop()
    assert_exact(pipeline, oracle)
