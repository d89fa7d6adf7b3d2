"""Options of verifications and replays, which the commands, the API and the jobs use."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

from cdc.errors import ConfigError
from cdc.position import Position

POINT_IN_TIME_REMEDY: Final = "write a position as 16/B374D848 or a time as 2026-01-31T12:00:00Z"


class VerifyMode(StrEnum):
    """What a verification compares."""

    #: Every row and column; reports the keys and columns that differ.
    ROWS = "rows"
    #: A digest over all rows and columns; reports whether rows differ, but not which rows.
    CHECKSUM = "checksum"
    #: The number of rows only.
    COUNT = "count"


class Against(StrEnum):
    """The reference for a verification of a sink: the source or the log."""

    #: The tables of the source, in one snapshot.
    SOURCE = "source"
    #: The rows computed from the log at the sink's applied position; the source is not read.
    LOG = "log"


def parse_point_in_time(text: str, option: str) -> Position | datetime:
    """Parse the start or end of a replay: a position, or a commit time in ISO 8601.

    A time without a time zone is in UTC. Raises ConfigError; the error contains `option`, the name of the option.
    """
    if "/" in text:
        return Position.parse(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(
            f"malformed {option} {text!r}: expected a position or a time", remedy=POINT_IN_TIME_REMEDY
        ) from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)
