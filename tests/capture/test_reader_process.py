"""Process: the retry policy of the reader."""

from __future__ import annotations

import pytest

from cdc.capture.reader_process import JITTER, UNDECODABLE_ATTEMPTS, retry_pause
from cdc.errors import LogUnwritable, SlotInUse, SlotMissing, SourceRejectsConnection, SourceUnreachable, UndecodableWal


def pauses(error: Exception, attempts: int) -> list[float | None]:
    return [retry_pause(error, n) for n in range(1, attempts + 1)]


def test_what_cannot_be_decoded_is_tried_four_times_in_half_a_minute_and_then_left_to_a_person() -> None:
    found = pauses(UndecodableWal("poison"), UNDECODABLE_ATTEMPTS)
    waits = [wait for wait in found if wait is not None]
    assert (len(waits), found[-1]) == (3, None)
    assert 10 < sum(waits) * (1 + JITTER) < 30
    assert all(wait >= 1 for wait in waits)


@pytest.mark.parametrize(
    "error", [SourceUnreachable("x"), SlotInUse("x"), LogUnwritable("x"), SourceRejectsConnection("x")]
)
def test_what_goes_by_itself_is_tried_for_ever_and_at_least_once_a_minute(error: Exception) -> None:
    waits = [wait for wait in pauses(error, 1000) if wait is not None]
    assert len(waits) == 1000
    assert waits == sorted(waits)
    assert waits[0] > 0
    assert waits[-1] <= 60


def test_a_slot_in_use_is_asked_for_steadily_however_long_it_was() -> None:
    assert max(wait or 0 for wait in pauses(SlotInUse("x"), 1000)) <= 1


def test_a_refused_login_is_asked_for_less_often_than_a_lost_connection() -> None:
    refused, lost = pauses(SourceRejectsConnection("x"), 8), pauses(SourceUnreachable("x"), 8)
    assert all((a or 0) > (b or 0) for a, b in zip(refused, lost, strict=True))


@pytest.mark.parametrize("error", [SlotMissing("x"), ValueError("x"), KeyboardInterrupt()])
def test_what_a_person_has_to_mend_is_not_tried_again(error: BaseException) -> None:
    assert retry_pause(error, 1) is None
