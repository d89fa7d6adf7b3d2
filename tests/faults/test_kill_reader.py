"""kill -9 of the reader under load: nothing lost, nothing twice, every transaction whole.

The oracle is a second slot with Postgres' own test_decoding: the log must hold exactly its changes, transaction by
transaction.
"""

from __future__ import annotations

import re
import signal
from collections import Counter
from collections.abc import Iterator
from random import Random

import psycopg
import pytest

from cdc.demo.shop_workload import Workload, make_shop
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.forked import Forked
from tests.fixtures.pipeline import Pipeline, delete_old_orders
from tests.fixtures.postgres import fresh_database

FAILPOINTS = [
    "after_receive:3", "before_data_file:2", "after_data_file:2", "after_log_commit:2", "before_confirm:40",
    "after_confirm:40",
]  # fmt: skip
"""The confirms come with every turn of the loop, data or not, so the fortieth is in the middle of the load."""
_CHANGE = re.compile(r"table \S+ (INSERT|UPDATE|DELETE):")
KILLED = -signal.SIGKILL


class Oracle:
    """What Postgres itself says happened since the slot was made: by test_decoding, or where a server lacks that
    plugin by pgoutput through SQL, read by the plain parser.
    """

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        with connect(dsn) as conn:
            try:
                conn.execute("SELECT pg_create_logical_replication_slot(%s, 'test_decoding')", [name])
                self._plugin = "test_decoding"
            except psycopg.errors.UndefinedFile:
                conn.execute("SELECT pg_create_logical_replication_slot(%s, 'pgoutput')", [name])
                self._plugin = "pgoutput"

    def changes(self) -> Counter[int]:
        """Rows changed by xid."""
        with connect(self._dsn) as conn:
            if self._plugin == "test_decoding":
                query = "SELECT xid::text::bigint, data FROM pg_logical_slot_peek_changes(%s, NULL, NULL)"
                return Counter(xid for xid, text in conn.execute(query, [self._name]) if _CHANGE.match(text))
            query = (
                "SELECT xid::text::bigint, data FROM pg_logical_slot_peek_binary_changes(%s, NULL, NULL, "
                "'proto_version', '1', 'publication_names', %s)"
            )
            rows = conn.execute(query, [self._name, f"cdc_{self._name}_pub"])
            return Counter(xid for xid, message in rows if bytes(message)[:1] in {b"I", b"U", b"D"})


@pytest.fixture(name="database")
def _database(request: pytest.FixtureRequest, postgres: EmbeddedPostgres) -> Iterator[str]:
    """On Debian's server where there is one: it has test_decoding."""
    try:
        server: EmbeddedPostgres = request.getfixturevalue("postgres_15")
    except pytest.skip.Exception:
        server = postgres
    yield from fresh_database(server)


@pytest.fixture(name="shop")
def _shop(pipeline: Pipeline) -> Iterator[tuple[Pipeline, Workload]]:
    prepare(pipeline)
    delete_old_orders(pipeline.dsn)
    workload = Workload(pipeline.dsn, rate=50.0, seed=7)
    yield pipeline, workload
    workload.stop()


def prepare(pipeline: Pipeline) -> None:
    """The shop's tables and rows."""
    make_shop(pipeline.dsn)
    pipeline.write()


def assert_exact(pipeline: Pipeline, oracle: Oracle) -> None:
    """The log holds what Postgres says, each once."""
    pipeline.settle()
    found, expected = pipeline.changes_by_transaction(), oracle.changes()
    assert {x: n for x, n in found.items() if expected[x] != n} == {}, pipeline.output()
    assert {x: n for x, n in expected.items() if found[x] != n} == {}, pipeline.output()


def killed_in_turn(pipeline: Pipeline, workload: Workload, failpoints: list[str], more: int) -> Forked:
    """Readers under load, each killed at its failpoint; the last one lives, and the log holds so many changes more."""
    killed = pipeline.reader(failpoints[0])
    pipeline.wait_for_copy()
    oracle = Oracle(pipeline.dsn, pipeline.name)
    workload.start()
    for failpoint, following in zip(failpoints, (*failpoints[1:], None), strict=True):
        assert killed.wait(60) == KILLED, f"{failpoint}\n{pipeline.output()}"
        killed = pipeline.reader(following)
    pipeline.wait_for_more(workload, more)
    workload.stop()
    assert_exact(pipeline, oracle)
    return killed


def test_a_reader_killed_at_one_failpoint_after_the_other_loses_and_doubles_nothing(shop: tuple[Pipeline, Workload]):
    """In one life: each reader begins with what the one before it left, and the log tells of all of them."""
    pipeline, workload = shop
    assert pipeline.reader("after_copy_staged").wait(60) == KILLED
    killed_in_turn(pipeline, workload, FAILPOINTS, more=20)


@pytest.mark.parametrize("seed", [pytest.param(n, marks=[pytest.mark.slow] if n > 1 else []) for n in range(1, 21)])
def test_a_reader_killed_at_random_moments_loses_and_doubles_nothing(shop: tuple[Pipeline, Workload], seed: int):
    pipeline, workload = shop
    random = Random(seed)
    reader = pipeline.reader()
    pipeline.wait_for_copy()
    oracle = Oracle(pipeline.dsn, pipeline.name)
    workload.start()
    for _ in range(3):
        pipeline.wait_for_more(workload, random.randint(10, 60))
        reader.kill()
        reader.wait()
        reader = pipeline.reader()
    workload.stop()
    assert_exact(pipeline, oracle)
