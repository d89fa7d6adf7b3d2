"""Two-phase transactions: a change is one when COMMIT PREPARED is, whoever died since PREPARE, and in that order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.faults.test_kill_reader import KILLED, Oracle, assert_exact
from tests.faults.write_load import TABLE
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import fresh_database, run_sql
from tests.fixtures.postgres_programs import MAIN_VERSION

SETTINGS = {"max_prepared_transactions": "8", "logical_decoding_work_mem": "64kB"}


@pytest.fixture(scope="module", name="server")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """One that knows two-phase transactions; a test may crash it."""
    with EmbeddedPostgres(
        tmp_path_factory.mktemp("prepared"), version=MAIN_VERSION, settings=SETTINGS, tcp=True
    ) as server:
        yield server


@pytest.fixture(name="database")
def _database(server: EmbeddedPostgres) -> Iterator[str]:
    yield from fresh_database(server)


@pytest.fixture(name="capturing")
def _capturing(pipeline: Pipeline) -> Pipeline:
    run_sql(pipeline.dsn, TABLE)
    pipeline.write(tables="public.*")
    return pipeline


def prepare(pipeline: Pipeline) -> None:
    """Transactions first, large and last, prepared in this order; one that is not committed between."""
    run_sql(
        pipeline.dsn,
        "BEGIN; INSERT INTO t VALUES (1, 'first'); PREPARE TRANSACTION 'first'",
        "BEGIN; INSERT INTO t SELECT i, repeat('x', 200) FROM generate_series(9, 3000) i; PREPARE TRANSACTION 'large'",
        "BEGIN; INSERT INTO t VALUES (2, 'never'); PREPARE TRANSACTION 'never'",
        "BEGIN; INSERT INTO t VALUES (3, 'last'); PREPARE TRANSACTION 'last'",
        "INSERT INTO t VALUES (4, 'plain')",
    )


EARLIER = (
    "BEGIN; INSERT INTO t VALUES (5, 'prepared first'); PREPARE TRANSACTION 'a'",
    "BEGIN; INSERT INTO t VALUES (6, 'prepared second'); PREPARE TRANSACTION 'b'",
    "COMMIT PREPARED 'b'",
    "COMMIT PREPARED 'a'",
)
"""Transactions that are prepared and committed in one life of reader and server."""
COMMITS = (
    "COMMIT PREPARED 'last'",
    "COMMIT PREPARED 'large'",
    "ROLLBACK PREPARED 'never'",
    "COMMIT PREPARED 'first'",
)
ORDER = ["prepared second", "prepared first", "plain", "last", "x" * 200, "first"]
"""Of the commits, which is not that of the xids."""


@pytest.mark.parametrize(
    "died",
    [*(pytest.param(died, marks=pytest.mark.slow) for died in ("nobody", "reader", "server")), "both"],
)
def test_prepared_transactions_come_at_their_commit_in_the_order_of_the_commits(
    server: EmbeddedPostgres, capturing: Pipeline, died: str
) -> None:
    reader = capturing.reader()
    capturing.wait_for_copy()
    oracle = Oracle(capturing.dsn, capturing.name)
    run_sql(capturing.dsn, *EARLIER)
    prepare(capturing)
    capturing.settle()
    assert names_in_log(capturing) == ORDER[:3]
    if died in {"reader", "both"}:
        reader.kill()
        assert reader.wait() == KILLED
    if died in {"server", "both"}:
        server.stop("immediate")
        server.start()
    if died in {"reader", "both"}:
        reader = capturing.reader()
    run_sql(capturing.dsn, *COMMITS)
    assert_exact(capturing, oracle)
    assert names_in_log(capturing) == ORDER
    assert reader.poll() is None


def names_in_log(pipeline: Pipeline) -> list[str]:
    """The values of the changes in the log's order, each once."""
    log = LogReader(pipeline.log)
    batches = log.rows(Position(0), log.durable or Position(0))
    rows = [row for batch in batches for row in batch.to_pylist() if row["op"] == "c"]
    rows.sort(key=lambda row: (row["position"], row["ordinal"]))
    return list(dict.fromkeys(dict(row["after"])[2] for row in rows))
