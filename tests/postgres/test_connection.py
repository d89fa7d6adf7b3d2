"""Connections: pinned settings, and messages that keep the password to themselves."""

from __future__ import annotations

import socket
import time
import traceback

import pytest

from cdc.errors import CdcError, MalformedDsn, SourceRejectsConnection, SourceUnreachable
from cdc.postgres.connection import HOST_TIMEOUT, PINNED, connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from tests.fixtures.postgres import run_sql

SECRET = "hunter2zz"
BROKEN = [
    f"postgresql://me:{SECRET}%zz{SECRET}@127.0.0.1:1/db",
    f"postgresql://me:{SECRET}@{SECRET}@127.0.0.1:1/db",
    f"postgresql://me:{SECRET}/{SECRET}@127.0.0.1:1/db",
    f"postgresql://me:x#{SECRET}@127.0.0.1:1/db",
    f"host=127.0.0.1 port=1 password=a {SECRET}",
    f"host=127.0.0.1 port=1 password='{SECRET}",
    f"postgresql://me:{SECRET}@127.0.0.1:1/db?sslmode=verify-fulll",
    f"postgresql://me:{SECRET}@127.0.0.1:1/db",
    f"host=/nowhere password={SECRET}",
]


@pytest.mark.parametrize("dsn", BROKEN)
def test_no_message_and_no_traceback_contains_the_password(dsn: str) -> None:
    with pytest.raises(CdcError) as caught:
        connect(dsn)

    assert SECRET not in caught.value.message
    lines = traceback.TracebackException.from_exception(caught.value).format_exception_only()
    assert SECRET not in "".join(lines)
    assert caught.value.__context__ is None


def test_a_dsn_that_cannot_be_read_is_malformed() -> None:
    with pytest.raises(MalformedDsn):
        connect("postgresql://me:pa%zz@127.0.0.1/db")


def test_a_closed_port_is_unreachable() -> None:
    with pytest.raises(SourceUnreachable, match="refused"):
        connect("postgresql://me@127.0.0.1:1/db")


def test_a_host_that_never_answers_costs_its_timeout_once(postgres: EmbeddedPostgres) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()  # the kernel accepts connections, and nobody answers
        hosts = f"127.0.0.1:{silent.getsockname()[1]},127.0.0.1:{postgres.port}"
        dsn = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
        for replication, least, most in ((False, HOST_TIMEOUT - 1, 30.0), (True, 0.0, HOST_TIMEOUT - 1)):
            began = time.monotonic()
            with connect(dsn, replication=replication) as conn:
                assert conn.info.port == postgres.port
            assert least <= time.monotonic() - began < most


def test_a_missing_database_is_named(postgres: EmbeddedPostgres) -> None:
    with pytest.raises(SourceRejectsConnection, match='"nowhere" does not exist'):
        connect(postgres.dsn("nowhere"))


def test_settings_are_pinned_whatever_the_database_prefers(either_database: str) -> None:
    name = either_database.rpartition("/")[2]
    run_sql(
        either_database,
        f"ALTER DATABASE {name} SET datestyle = 'German'",  # type: ignore[arg-type]
        f"ALTER DATABASE {name} SET bytea_output = 'escape'",  # type: ignore[arg-type]
        f"ALTER DATABASE {name} SET timezone = 'Asia/Tokyo'",  # type: ignore[arg-type]
    )
    for replication in (False, True):
        with connect(either_database, replication=replication) as conn:
            found: dict[str, str] = dict(conn.execute("SELECT lower(name), setting FROM pg_settings").fetchall())

        assert {setting: found[setting].split(",")[0] for setting in PINNED} == PINNED
        assert found["client_encoding"] == "UTF8"


def test_options_of_the_dsn_are_kept_in_addition_to_the_pinned_ones(database: str) -> None:
    with connect(f"{database}?options=-c%20work_mem%3D77kB") as conn:
        row = conn.execute("SELECT current_setting('work_mem'), current_setting('bytea_output')").fetchone()
    assert row == ("77kB", "hex")


def test_a_unix_socket_works(postgres: EmbeddedPostgres) -> None:
    with connect(f"host={postgres.socket_directory} port={postgres.port} user=postgres dbname=postgres") as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
