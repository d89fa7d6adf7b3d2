"""Connections: pinned settings, and messages that keep the password to themselves."""

from __future__ import annotations

import socket
import time
import traceback
from select import select

import pytest
from psycopg import Connection

from cdc.errors import CdcError, MalformedDsn, SourceError, SourceRejectsConnection, SourceUnreachable
from cdc.postgres.connection import HOST_TIMEOUT, PINNED, connect
from cdc.postgres.copy_in_snapshot import begin_snapshot
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import create_slot
from tests.fixtures.waiting import until

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


DISTURBING = {
    "datestyle": "German",
    "bytea_output": "escape",
    "timezone": "Asia/Tokyo",
    "row_security": "on",
    "statement_timeout": "1",
    "lock_timeout": "1",
    "idle_in_transaction_session_timeout": "1",
    "idle_session_timeout": "1",
    "exit_on_error": "on",
    "default_transaction_isolation": "serializable",
    "default_transaction_read_only": "on",
    "default_transaction_deferrable": "on",
    "array_nulls": "off",
    "transform_null_equals": "on",
    "gin_fuzzy_search_limit": "3",
    "transaction_timeout": "100",
    "client_encoding": "LATIN1",
    "synchronous_commit": "off",
    "work_mem": "64kB",
}
"""Settings that a role or a database may have, for people or applications."""


def test_settings_are_pinned_whatever_role_and_database_prefer(any_database: str) -> None:
    name, server = any_database.rpartition("/")[2], connect(any_database)
    for index, (setting, value) in enumerate(DISTURBING.items()):
        if setting != "transaction_timeout" or server.info.server_version >= 170000:
            place = f"DATABASE {name}" if index % 2 else f"ROLE postgres IN DATABASE {name}"
            server.execute(f"ALTER {place} SET {setting} = '{value}'".encode())
    for replication in (False, True):
        with connect(any_database, replication=replication) as conn:
            found: dict[str, str] = dict(conn.execute("SELECT lower(name), setting FROM pg_settings").fetchall())

        assert {setting: found[setting].split(",")[0] for setting in PINNED} == PINNED
        assert found.get("transaction_timeout", "0") == "0"
        assert found["client_encoding"] == "UTF8"
    with connect(any_database, autocommit=False) as conn, create_slot(any_database, name) as snapshot:
        begin_snapshot(conn, snapshot.name)
        server.execute("SET statement_timeout = 0; SELECT pg_sleep(0.15)")  # longer than each of the timeouts
        assert conn.execute("SELECT 1").fetchone() == (1,)
    server.close()


def test_an_error_that_leaves_a_block_has_a_code(database: str) -> None:
    """Also one that only the end of the block meets."""
    with pytest.raises(SourceError, match="no_such_table"), connect(database) as conn:
        conn.execute("SELECT FROM no_such_table")
    with pytest.raises(SourceUnreachable), connect(database, autocommit=False) as conn:
        end_session(conn)


def end_session(conn: Connection) -> None:
    """End a session inside its transaction, as a timeout of the server does, and let no statement meet that."""
    conn.execute("SET idle_in_transaction_session_timeout = 1")
    until(lambda: select([conn], [], [], 0)[0], "the end of the session")


def test_options_of_the_dsn_are_kept_in_addition_to_the_pinned_ones(database: str) -> None:
    with connect(f"{database}?options=-c%20work_mem%3D77kB") as conn:
        row = conn.execute("SELECT current_setting('work_mem'), current_setting('bytea_output')").fetchone()
    assert row == ("77kB", "hex")


def test_a_unix_socket_works(postgres: EmbeddedPostgres) -> None:
    with connect(f"host={postgres.socket_directory} port={postgres.port} user=postgres dbname=postgres") as conn:
        assert conn.execute("SELECT 1").fetchone() == (1,)
