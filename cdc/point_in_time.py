"""Moment: a place in the log as a person writes it, a position or a time of the source's clock."""

from __future__ import annotations

from datetime import UTC, datetime

from cdc.errors import ConfigError
from cdc.position import Position

WRITE_MOMENT = "write a position as 16/B374D848 or a time as 2026-01-31T12:00:00Z"


def parse_moment(text: str, option: str) -> Position | datetime:
    """Read a position, or a time as ISO 8601, which is UTC if it does not say; raises ConfigError naming the option."""
    if "/" in text:
        return Position.parse(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"malformed {option} {text!r}", remedy=WRITE_MOMENT) from error
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
