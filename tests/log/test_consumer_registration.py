"""Registration of a consumer: reported at once, then at intervals, and removed."""

from __future__ import annotations

from pathlib import Path

from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.consumers import list_consumers
from cdc.position import Position


def test_a_registration_is_reported_and_removed(tmp_path: Path) -> None:
    registered = ConsumerRegistration(tmp_path, "an-id", "events")
    registered.report(Position(10))
    registered.report(Position(20))
    first = [(one.name, one.position) for one in list_consumers(tmp_path)]
    registered.report(Position(30), 4, at_once=True)
    second = [(one.name, one.position, one.pinned) for one in list_consumers(tmp_path)]
    registered.unregister()

    assert first == [("events", 10)]  # the next report is due in some seconds
    assert second == [("events", 30, 4)]
    assert list_consumers(tmp_path) == []
