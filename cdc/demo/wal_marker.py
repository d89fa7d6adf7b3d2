"""WAL marker: a logical message in the shop's WAL after everything that was committed before it."""

from __future__ import annotations

from cdc.change import HEARTBEAT_PREFIX
from cdc.lsn import Lsn
from cdc.postgres.connection import connect
from cdc.postgres.heartbeat import emit_message


def write_marker(dsn: str, why: str) -> Lsn:
    """Write a message with the content `why`; returns the LSN where it ends."""
    with connect(dsn, application_name="cdc demo") as connection:
        return emit_message(connection, HEARTBEAT_PREFIX, why)
