"""Repair of text that is not UTF-8: selects the policy's repair function if the source database is SQL_ASCII."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from cdc.config.definition import Undecodable
from cdc.pgoutput.copy_decoder import Lines
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.text_repair import CopyTextRepair, FrameTextRepair
from cdc.position import Position
from cdc.postgres.connection import connect, is_sql_ascii
from cdc.table import TableSchema

T = TypeVar("T")
RepairFrames: TypeAlias = Callable[[FrameBatch], FrameBatch]
RepairLines: TypeAlias = Callable[[TableSchema], Callable[[Lines], Lines]]


def unchanged(value: T) -> T:
    """No repair, for databases with an encoding: the server converts their text to UTF-8."""
    return value


def frame_text_repair(dsn: str, policy: Undecodable, after: Position) -> RepairFrames:
    """The repair of batches of plain frames, to be called before decoding; reads the server's encoding once."""
    with connect(dsn, application_name="cdc encoding") as conn:
        return FrameTextRepair(policy, after) if is_sql_ascii(conn) else unchanged


def copy_text_repair(dsn: str, policy: Undecodable) -> RepairLines:
    """The repair of the lines of a COPY, by table."""
    with connect(dsn, application_name="cdc encoding") as conn:
        raw = is_sql_ascii(conn)
    return lambda schema: CopyTextRepair(policy, schema) if raw else unchanged
