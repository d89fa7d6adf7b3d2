"""A program: load the kernels, capture a session of every kind of message, and print what was compiled or loaded in it.

Arguments: DSN and an empty folder. One line per compiled function that the session added a form of arguments to.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher

from cdc.pgoutput.load_kernels import load_kernels
from cdc.postgres import copy_data_receiver
from cdc.postgres.connection import connect
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql

STREAMED = "?options=-c%20logical_decoding_work_mem%3D64kB"
WIDE = ", ".join(f"c{number} text" for number in range(300))


def forms() -> dict[str, list[Any]]:
    """The forms of arguments that each compiled function is loaded for, by its name."""
    found = [one for one in gc.get_objects() if isinstance(one, Dispatcher)]
    return {f"{one.py_func.__module__}.{one.py_func.__qualname__}": list(one.overloads) for one in found}


def write(dsn: str) -> None:
    """Rows, keys, TOAST, truncates, messages, versions, and a transaction that is streamed and partly taken back."""
    run_sql(
        dsn,
        "INSERT INTO t SELECT i, 'ü', repeat('x', 9999) FROM generate_series(10, 900) i",
        "UPDATE t SET v = 'moved' WHERE id = 1",
        "UPDATE t SET id = 2 WHERE id = 1",
        "DELETE FROM t WHERE id = 2",
        "INSERT INTO wide (c1, c299) VALUES ('a', NULL)",
        "TRUNCATE wide",
        "SELECT pg_logical_emit_message(true, 'audit', 'inside')",
        "SELECT pg_logical_emit_message(false, 'audit', 'outside')",
        "ALTER TABLE t ADD COLUMN more text",
        "INSERT INTO t VALUES (3, 'a', 'b', 'c')",
        "CREATE TABLE later (id int PRIMARY KEY)",
        "INSERT INTO keyless VALUES ('a')",
        "DELETE FROM keyless",
    )
    with connect(dsn) as conn, conn.transaction():
        conn.execute("INSERT INTO t SELECT i, repeat('y', 300) FROM generate_series(1000, 3000) i")
        with conn.transaction(force_rollback=True):
            conn.execute("INSERT INTO t SELECT i, repeat('z', 300) FROM generate_series(4000, 6000) i")
        conn.execute("TRUNCATE keyless")


def main(dsn: str, folder: Path) -> None:
    """Copy, then stream."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY, v text, big text)", "CREATE TABLE keyless (v text)")
    run_sql(dsn, "ALTER TABLE keyless REPLICA IDENTITY FULL", "ALTER TABLE t ALTER big SET STORAGE EXTERNAL")
    with connect(dsn) as conn:
        conn.execute(f"CREATE TABLE wide (id serial PRIMARY KEY, {WIDE})".encode())
    run_sql(dsn, "INSERT INTO t VALUES (1, 'copied', repeat('x', 9999))")
    held = Captured(folder, dsn + STREAMED, slot=dsn.rpartition("/")[2])
    load_kernels()
    copy_data_receiver.load_functions()
    before = forms()
    held.copy()
    write(dsn)
    held.stream()
    assert {row["op"] for row in held.rows()} >= set("rcudstm")
    for name, loaded in forms().items():
        if loaded != before.get(name, []):
            print(name, loaded)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
