"""Receiving CopyData messages: the compiled loop and the loop in Python read the same, and detect a lost connection."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from psycopg import OperationalError, generators, sql

from cdc.postgres import copy_data_receiver
from cdc.postgres.connection import connect

ENDLESS = sql.SQL("SELECT repeat('x', 10000) FROM generate_series(1, 300000)").format()


def read_all(drain: copy_data_receiver.LineDrain) -> None:
    while drain.gather(1 << 20) >= copy_data_receiver.PENDING:
        drain.take()


def test_the_compiled_loop_and_the_loop_in_python_read_the_same_lines(database: str):
    statement = b"COPY (SELECT i, repeat('x', i * i % 3001) FROM generate_series(1, 2000) i) TO STDOUT"
    copies = []
    assert copy_data_receiver.load_functions() is not None
    with connect(database) as conn:
        for in_python in (False, True):
            conn.pgconn.send_query(statement)
            conn.wait(generators.execute(conn.pgconn))
            drain, parts = copy_data_receiver.LineDrain(conn.pgconn), []
            assert drain._functions is not None
            if in_python:
                drain._functions = None
            while drain.gather(100_000) >= copy_data_receiver.PENDING:
                if drain.nbytes >= 100_000:
                    parts.append(bytes(drain.take()))
            copies.append(b"".join([*parts, drain.take()]))
            while conn.pgconn.get_result() is not None:
                pass
    assert copies[0] == copies[1] == b"".join(b"%d\t%s\n" % (i, b"x" * (i * i % 3001)) for i in range(1, 2001))


@pytest.mark.parametrize("in_python", [False, True])
def test_messages_are_collected_until_they_are_taken(database: str, in_python: bool):
    lines = [b"%d\t%s\n" % (i, b"x" * (i * i % 3001)) for i in range(1, 2001)]
    with connect(database) as conn:
        drain, batches = copy_data_receiver.CopyDrain(conn.pgconn), []
        assert drain._functions is not None
        if in_python:
            drain._functions = None
        conn.pgconn.send_query(b"COPY (SELECT i, repeat('x', i * i % 3001) FROM generate_series(1, 2000) i) TO STDOUT")
        conn.wait(generators.execute(conn.pgconn))
        collected = 0
        while drain.collect().status >= copy_data_receiver.PENDING:
            assert drain.nbytes == sum(map(len, lines[collected : collected + drain.count]))
            if drain.count >= 300:
                collected += drain.count
                batches.append(drain.take())
                assert drain.count == drain.nbytes == 0
            select.select([conn.pgconn.socket], [], [], 1)
            conn.pgconn.consume_input()
        batches.append(drain.take())
        while conn.pgconn.get_result() is not None:
            pass
    assert [bytes(frame) for batch in batches for frame in batch] == lines
    assert len(batches) > 2


def test_a_copy_waits_for_no_compiler(tmp_path: Path):
    code = """
from cdc.postgres import copy_data_receiver as receiver
assert receiver.load_cached_functions() is None
assert receiver.load_functions() is not None
assert receiver.load_cached_functions() == receiver.load_functions()
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("in_python", [False, True])
def test_a_broken_connection_during_a_copy_is_an_error(database: str, in_python: bool):
    with connect(database) as conn:
        conn.pgconn.send_query(b"COPY (" + ENDLESS.as_bytes(conn) + b") TO STDOUT")
        conn.wait(generators.execute(conn.pgconn))
        drain = copy_data_receiver.LineDrain(conn.pgconn)
        if in_python:
            drain._functions = None
        socket.socket(fileno=os.dup(conn.pgconn.socket)).shutdown(socket.SHUT_RDWR)
        with pytest.raises(OperationalError, match="closed the connection"):
            read_all(drain)
