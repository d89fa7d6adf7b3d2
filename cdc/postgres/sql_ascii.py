"""Encoding of the source database: SQL_ASCII databases, and the repair of their text.

Postgres converts the text of a database with an encoding to UTF-8. It neither validates nor converts the text of an
SQL_ASCII database, so the reader repairs it by the policy of the definition (`cdc.pgoutput.text_repair`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias, TypeVar

import psycopg
from psycopg import sql

from cdc.config.source import Undecodable
from cdc.pgoutput.copy_decoder import Lines
from cdc.pgoutput.message_parser import FrameBatch
from cdc.pgoutput.text_repair import CopyTextRepair, FrameTextRepair
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.table import TableSchema

T = TypeVar("T")
RepairFrames: TypeAlias = Callable[[FrameBatch], FrameBatch]
RepairLines: TypeAlias = Callable[[TableSchema], Callable[[Lines], Lines]]
_RAW: Final = "SQL_ASCII"


def unchanged(value: T) -> T:
    """Return the value without a repair, for databases whose text Postgres converts to UTF-8."""
    return value


def frame_text_repair(dsn: str, policy: Undecodable, after: Position) -> RepairFrames:
    """Return the function that repairs batches of frames before they are decoded.

    Frames of transactions at or below `after` stay unchanged. If the database is not SQL_ASCII, the function changes
    nothing.
    """
    with connect(dsn, application_name="cdc encoding") as conn:
        return FrameTextRepair(policy, after) if is_sql_ascii(conn) else unchanged


def copy_text_repair(dsn: str, policy: Undecodable) -> RepairLines:
    """Return a function that takes a table's schema and returns the repair function for COPY lines of the table.

    If the database is not SQL_ASCII, the lines stay unchanged.
    """
    with connect(dsn, application_name="cdc encoding") as conn:
        raw = is_sql_ascii(conn)
    return lambda schema: CopyTextRepair(policy, schema) if raw else unchanged


def is_sql_ascii(conn: psycopg.Connection) -> bool:
    """Return True if the database has the encoding SQL_ASCII, so that Postgres does not check or convert its text."""
    return conn.info.parameter_status("server_encoding") == _RAW


def disable_encoding_conversion(conn: psycopg.Connection) -> None:
    """Make this session receive text exactly as it is stored, even if it is not UTF-8.

    Only for an SQL_ASCII database. psycopg returns text of this session as bytes until `SET client_encoding TO UTF8`.
    """
    conn.execute(sql.SQL("SET client_encoding TO {}").format(sql.Literal(_RAW)))
