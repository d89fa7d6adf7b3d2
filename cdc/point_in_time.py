"""Parser of a point in time on the command line: a log position or a time of the source's clock."""

from __future__ import annotations

from datetime import UTC, datetime

from cdc.errors import ConfigError
from cdc.position import Position

POINT_IN_TIME_REMEDY = "write a position as 16/B374D848 or a time as 2026-01-31T12:00:00Z"


def parse_point_in_time(text: str, option: str) -> Position | datetime:
    """Parse a position or an ISO 8601 time, by default in UTC; raises ConfigError with the name of the option."""
    if "/" in text:
        return Position.parse(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"malformed {option} {text!r}", remedy=POINT_IN_TIME_REMEDY) from error
    return time if time.tzinfo else time.replace(tzinfo=UTC)
