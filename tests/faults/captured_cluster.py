"""A captured database on a primary with standbys, whose slot they synchronize."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import LiteralString

import pyarrow.compute as pc
import pytest

from cdc.capture.startup_checks import check_log, find_problems
from cdc.errors import CdcError, LogError
from cdc.log.disk_format import CommitInfo
from cdc.log_row import Operation
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.faults.capture import Captured, rows_with
from tests.fixtures.postgres import rows_of, run_sql
from tests.fixtures.replicated_postgres import Cluster, ClusterMember, dsn_of_all

SLOT = "cdc_shop"
TABLES: dict[str, LiteralString] = {
    "t": "SELECT id::text, v FROM t",
    "u": "SELECT id::text FROM u",
    "w": "SELECT id::text, v FROM w",
}
"""The rows of each table, as the log folds them."""


class CapturedCluster(Captured):
    """A captured database whose slot standbys synchronize; `t`, `u` and `w` are its tables."""

    below = ""

    def __init__(self, folder: Path, servers: Cluster) -> None:
        super().__init__(folder, servers.primary.dsn(), slot=SLOT)

    def write(self, *, tables: str = "public.*", slot: str, more: str = "") -> None:
        self.path.write_text(
            f"version: 1\nname: held\nsource:\n  dsn: '{self.dsn}'\n  slot: {{name: {slot}, failover: true}}\n{more}"
            f"tables: [{{match: '{tables}'}}]\nlog: {{path: '{self.folder}/log'}}\n{self.below}"
        )

    def point_at(self, *servers: EmbeddedPostgres, more: str = "", below: str = "") -> None:
        """Name other servers in the definition; `more` are keys of the source, `below` those after it."""
        self.below = below
        self.dsn = servers[0].dsn() if len(servers) == 1 else dsn_of_all(*servers)
        self.write(slot=SLOT, more=more)

    @property
    def last(self) -> CommitInfo:
        """Of the log."""
        found = self.log.last_commit
        assert found is not None
        return found

    def states(self) -> dict[str, str]:
        """Of the tables, as the log has them."""
        return {schema.name: schema.state.value for schema in self.log.schemas().values()}

    def copies(self) -> dict[str, int]:
        """How many full copies of each table have ended; after the keys of lost transactions were read, none has."""
        found = rows_with(self.log, pc.field("op") == Operation.GENERATION.value, "topic", "payload")
        topics = [str(row["topic"]) for row in found if int(row["payload"])]
        return {topic.removeprefix("public."): topics.count(topic) for topic in topics}

    def is_complete(self, server: EmbeddedPostgres) -> bool:
        """Whether the log folds to the rows of the server, and no table waits to be read again."""
        return self.is_source(server) and set(self.states().values()) == {"live"}

    def is_source(self, server: EmbeddedPostgres) -> bool:
        """Whether the log folds to the rows of the server; a log without its tables does not."""
        with suppress(LogError):
            if {schema.name for schema in self.log.schemas().values()} >= TABLES.keys():
                return all(self.folded(name) == sorted(rows_of(server.dsn(), rows)) for name, rows in TABLES.items())
        return False


def captured_cluster(folder: Path, servers: Cluster) -> CapturedCluster:
    """A primary with tables that are captured from later on."""
    run_sql(
        servers.primary.dsn(),
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "CREATE TABLE u (id int PRIMARY KEY)",
        "CREATE TABLE w (id int PRIMARY KEY, v text)",
        "INSERT INTO t VALUES (1, 'one')",
    )
    return CapturedCluster(folder, servers)


def synced_standby(servers: Cluster, held: CapturedCluster) -> ClusterMember:
    """A standby that has the slot of the log, after the first copy."""
    standby = servers.standby()
    held.copy()
    with held.reading() as reading:
        run_sql(servers.primary.dsn(), "INSERT INTO w VALUES (1, 'before')")
        reading.caught_up()
        standby.sync_slots(SLOT)
    return standby


def refused(held: CapturedCluster, error: type[CdcError], says: str) -> None:
    """Doctor and the start of a reader refuse the source; the log does not move."""
    before = held.log.durable
    with pytest.raises(error, match=says):
        check_log(held.definition)
    assert error.code in {problem.code for problem in find_problems(held.definition)}
    with pytest.raises(CdcError):
        held.stream()
    assert held.log.durable == before
