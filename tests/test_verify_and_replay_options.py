"""Options of jobs: a point in time is a position or a commit time."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest

from cdc.errors import ConfigError
from cdc.position import Position
from cdc.verify_and_replay_options import parse_point_in_time


def test_a_point_in_time_is_a_position_or_a_time_by_default_in_utc() -> None:
    assert parse_point_in_time("2:16/B374D848", "--to") == Position.parse("2:16/B374D848")
    assert parse_point_in_time("2026-01-31T12:00:00", "--to") == datetime(2026, 1, 31, 12, tzinfo=UTC)
    east = timezone(timedelta(hours=2))
    assert parse_point_in_time("2026-01-31T12:00:00+02:00", "--to") == datetime(2026, 1, 31, 12, tzinfo=east)


def test_a_malformed_time_is_an_error_that_names_the_option() -> None:
    with pytest.raises(ConfigError, match="malformed --from 'yesterday'") as error:
        parse_point_in_time("yesterday", "--from")
    assert "2026-01-31T12:00:00Z" in error.value.fix
