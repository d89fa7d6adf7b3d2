"""Verification: the words of `cdc verify`, for the command, the API and who does it."""

from __future__ import annotations

from enum import StrEnum


class VerifyMode(StrEnum):
    """How closely a table is looked at."""

    #: Every row and column; keys and columns that differ are named.
    ROWS = "rows"
    #: A digest of every row and column, made where the rows are; says whether they differ, not which.
    CHECKSUM = "checksum"
    #: How many rows there are.
    COUNT = "count"


class Against(StrEnum):
    """What a sink is held against."""

    #: The tables of the source, at one instant.
    SOURCE = "source"
    #: What the log says of them where the sink stands; the source is not touched.
    LOG = "log"
