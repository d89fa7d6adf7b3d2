"""Options of `cdc verify`, shared by the command, the API and the verification job."""

from __future__ import annotations

from enum import StrEnum


class VerifyMode(StrEnum):
    """What is compared."""

    #: Every row and column; reports the keys and columns that differ.
    ROWS = "rows"
    #: A digest over all rows and columns, computed where the rows are; reports whether they differ, not which.
    CHECKSUM = "checksum"
    #: The number of rows.
    COUNT = "count"


class Against(StrEnum):
    """The reference that a sink is compared with."""

    #: The tables of the source, in one snapshot.
    SOURCE = "source"
    #: The state that the log gives for the sink's applied position; the source is not read.
    LOG = "log"
