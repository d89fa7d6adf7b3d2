"""Server versions that no package brings, from containers where an engine answers: copy and stream as elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import docker
import pytest
from docker.errors import DockerException
from testcontainers.community.postgres import PostgresContainer

from cdc.postgres.connection import connect
from tests.faults.capture import Captured
from tests.fixtures.postgres import rows_of, run_sql


@pytest.fixture(name="contained", params=[14, 17])
def _contained(request: pytest.FixtureRequest) -> Iterator[tuple[int, str]]:
    """(Version, DSN) of a server in a container."""
    try:
        docker.from_env().ping()
    except DockerException:
        pytest.skip("no container engine answers here")
    version: int = request.param
    server = PostgresContainer(f"postgres:{version}", username="postgres", dbname="postgres")
    server.with_env("POSTGRES_HOST_AUTH_METHOD", "trust").with_command("-c wal_level=logical")
    with server:
        yield (
            version,
            f"postgresql://postgres@{server.get_container_host_ip()}:{server.get_exposed_port(5432)}/postgres",
        )


def test_a_copy_and_a_stream_end_in_the_sources_state(tmp_path: Path, contained: tuple[int, str]) -> None:
    version, dsn = contained
    with connect(dsn) as conn:
        assert conn.info.server_version // 10_000 == version
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text)", "INSERT INTO t VALUES (1, 'one'), (2, 'two')")
    held = Captured(tmp_path, dsn, slot="s_contained")
    held.copy()
    run_sql(
        dsn,
        "UPDATE t SET id = 3 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO t SELECT i, repeat('x', 300) FROM generate_series(10, 5000) i",
    )
    held.stream()
    assert held.folded("t") == sorted(rows_of(dsn, "SELECT id::text, v FROM t"))
