"""Records of a log's status."""

from __future__ import annotations

from cdc.position import Position
from cdc.service.log_status_records import ConsumerLine, LogState, LogStatus, wal_between


def test_wal_is_not_counted_from_one_epoch_into_another() -> None:
    assert wal_between(Position.of(5), Position.of(9)) == 4
    assert wal_between(Position.of(9), Position.of(5)) == 0
    assert wal_between(Position.of(9), Position.of(5, epoch=1)) is None


def test_the_slowest_consumer_has_the_lowest_position() -> None:
    lines = tuple(
        ConsumerLine(
            name=name, uuid=name, position=position, pinned=None, behind_bytes=0, behind_seconds=0.0,
            behind_segments=0, holds_bytes=0, seen_at="2026-01-01T00:00:00+00:00", seen_seconds=0.0, state="running",
        )
        for name, position in (("a", "0/9"), ("b", "0/10"), ("c", "1:0/1"))
    )  # fmt: skip
    status = LogStatus(at="2026-01-01T00:00:00+00:00", state=LogState.READ, consumers=lines)
    assert status.slowest is lines[0]
    assert LogStatus(at=status.at, state=LogState.READ).slowest is None
