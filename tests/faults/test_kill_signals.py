"""kill -9 of the reader around a signal: it is carried out all the same, and once."""

from __future__ import annotations

import signal
from collections import Counter

import pytest

from cdc.catalog import Catalog, Command
from cdc.log.reader import LogReader
from cdc.log_row import Operation
from cdc.position import Position
from cdc.snapshot.backfill_documents import BACKFILL
from cdc.snapshot.debezium_signal_queue import FOLDER
from cdc.snapshot.debezium_signals import SIGNAL
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql


@pytest.mark.parametrize(
    "failpoint",
    [
        "signal_posted",
        pytest.param("signal_kept", marks=pytest.mark.slow),
        pytest.param("signal_noted", marks=pytest.mark.slow),
        pytest.param("signal_finished", marks=pytest.mark.slow),
    ],
)
def test_a_signal_is_carried_out_once_however_the_reader_died(pipeline: Pipeline, failpoint: str) -> None:
    """Before the log held it; after it was noted; after its backfill was asked for; after that was noted."""
    run_sql(
        pipeline.dsn,
        "CREATE SCHEMA shop",
        "CREATE TABLE shop.t (id int PRIMARY KEY, v text)",
        "CREATE TABLE shop.signals (id text PRIMARY KEY, type text NOT NULL, data text)",
        "INSERT INTO shop.t SELECT i, 'v' || i FROM generate_series(1, 100) i",
    )
    pipeline.write()
    with pipeline.definition.open("a") as definition:
        definition.write("snapshot: {signals: shop.signals}\n")
    killed = pipeline.reader(failpoint=failpoint)
    pipeline.wait(lambda: pipeline.durable() > 0, "the copy")
    run_sql(
        pipeline.dsn,
        """INSERT INTO shop.signals VALUES ('one', 'execute-snapshot', '{"data-collections": ["shop.t"]}')""",
    )
    assert killed.wait(60) == -signal.SIGKILL
    pipeline.reader()
    pipeline.wait(lambda: ended(pipeline, SIGNAL) and ended(pipeline, BACKFILL), "the end of the backfill")
    pipeline.settle()
    pipeline.wait(lambda: not list((pipeline.log / FOLDER).iterdir()), "an empty inbox")
    assert [command.state for command in ended(pipeline, SIGNAL)] == ["done"]
    assert [command.state for command in ended(pipeline, BACKFILL)] == ["done"]
    log = LogReader(pipeline.log)
    read = Counter(
        row["key"][0]
        for batch in log.rows(Position(0), log.durable or Position(0), topics=lambda topic: topic == "shop.t")
        for row in batch.select(["op", "key"]).to_pylist()
        if row["op"] == Operation.READ.value
    )
    assert set(read.values()) == {2}  # once by the copy, once by the backfill


def ended(pipeline: Pipeline, kind: str) -> list[Command]:
    """The commands of a kind, none while one of them is pending."""
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        found = catalog.commands.ls(pipeline.name, kind)
    return found if all(command.state != "pending" for command in found) else []
