"""The registration of a consumer: a file next to the log, which is written rarely and never stops the consumer."""

from __future__ import annotations

from pathlib import Path

from cdc.log.consumer_registration import ConsumerRegistration
from cdc.log.consumers import FOLDER, list_consumers
from cdc.position import Position


def test_the_first_report_is_written_and_later_ones_when_they_are_due(tmp_path: Path) -> None:
    registration = ConsumerRegistration(tmp_path, "id", "copy")
    registration.report(Position(10))
    registration.report(Position(20))
    (first,) = list_consumers(tmp_path)
    registration.report(Position(30), pinned=4, at_once=True)
    (last,) = list_consumers(tmp_path)

    assert (first.name, first.position, first.pinned) == ("copy", 10, None)
    assert (last.position, last.pinned) == (30, 4)


def test_a_registration_can_be_removed(tmp_path: Path) -> None:
    registration = ConsumerRegistration(tmp_path, "id", "copy")
    registration.report(Position(10))

    registration.unregister()

    assert list_consumers(tmp_path) == []


def test_a_registration_that_cannot_be_written_does_not_stop_the_consumer(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    registration = ConsumerRegistration(tmp_path, "id", "copy")
    registration.report(Position(10))
    registration.unregister()
    (tmp_path / FOLDER).unlink()

    registration.report(Position(20), at_once=True)

    (found,) = list_consumers(tmp_path)
    assert found.position == 20
