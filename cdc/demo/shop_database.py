"""The shop's database: the SQL files of this package, its creation, and markers in its WAL."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Final

from cdc.change import HEARTBEAT_PREFIX
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.logical_messages import emit_message

_NAME: Final = re.compile(r"^-- name: (\w+)\n(?:--.*\n)+", re.MULTILINE)


def script_text(name: str) -> str:
    """The text of a file of this package."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def script(name: str) -> bytes:
    """All statements of a file, for one `execute` without parameters."""
    return script_text(f"{name}.sql").encode()


def named_statements(name: str) -> dict[str, bytes]:
    """The statements of a file by their `-- name:` lines."""
    pieces = _NAME.split(script_text(f"{name}.sql"))[1:]
    return {title: text.strip().encode() for title, text in zip(pieces[::2], pieces[1::2], strict=True)}


def write_marker(dsn: str, why: str) -> Lsn:
    """Write a logical message into the WAL, after everything that is committed now; returns the LSN where it ends."""
    with connect(dsn, application_name="cdc demo") as connection:
        return emit_message(connection, HEARTBEAT_PREFIX, why)


def make_shop(dsn: str) -> None:
    """Create the shop's tables in an empty database and insert its first rows."""
    with connect(dsn, application_name="cdc demo") as connection:
        for name in ("shop", "seed"):
            connection.execute(script(name))
