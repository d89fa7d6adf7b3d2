"""Mending: the policy for text that is not UTF-8, put to work only where the source can hold such text."""

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
    """The mender of every database that declares an encoding: the server has converted its text."""
    return value


def frame_text_repair(dsn: str, policy: Undecodable, after: Position) -> RepairFrames:
    """What every batch of plain frames goes through before it is decoded; asks the server for its encoding once."""
    with connect(dsn, application_name="cdc encoding") as conn:
        return FrameTextRepair(policy, after) if is_sql_ascii(conn) else unchanged


def copy_text_repair(dsn: str, policy: Undecodable) -> RepairLines:
    """The same for the lines of a copy, one mender for each table."""
    with connect(dsn, application_name="cdc encoding") as conn:
        raw = is_sql_ascii(conn)
    return lambda schema: CopyTextRepair(policy, schema) if raw else unchanged
