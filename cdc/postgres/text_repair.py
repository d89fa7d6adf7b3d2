"""Mending: the policy for text that is not UTF-8, put to work only where the source can hold such text."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from cdc.config.definition import Undecodable
from cdc.pgoutput.copy_decoder import Lines
from cdc.pgoutput.frames import FrameBatch
from cdc.pgoutput.text_repair import CopyMender, FrameMender
from cdc.position import Position
from cdc.postgres.connection import connect, is_raw
from cdc.table import TableSchema

T = TypeVar("T")
MendFrames: TypeAlias = Callable[[FrameBatch], FrameBatch]
MendLines: TypeAlias = Callable[[TableSchema], Callable[[Lines], Lines]]


def unchanged(value: T) -> T:
    """The mender of every database that declares an encoding: the server has converted its text."""
    return value


def frame_mender(dsn: str, policy: Undecodable, after: Position) -> MendFrames:
    """What every batch of plain frames goes through before it is decoded; asks the server for its encoding once."""
    with connect(dsn, application_name="cdc encoding") as conn:
        return FrameMender(policy, after) if is_raw(conn) else unchanged


def line_mender(dsn: str, policy: Undecodable) -> MendLines:
    """The same for the lines of a copy, one mender for each table."""
    with connect(dsn, application_name="cdc encoding") as conn:
        raw = is_raw(conn)
    return lambda schema: CopyMender(policy, schema) if raw else unchanged
