"""Pages for receivers: every request has an answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.delivery.destinations.contract import HistoryPage
from cdc.delivery.destinations.history_pages import answered_page
from cdc.errors import CdcError, DestinationUnavailable, LogTrimmed
from tests.delivery.destinations.recorded import RecordedHistory


class FailingHistory:
    """A history that always fails."""

    def __init__(self, failure: Exception) -> None:
        self._failure = failure

    def page(self, after: str, most: int) -> HistoryPage:
        assert most > len(after)
        raise self._failure


def test_a_page_is_what_the_history_has(tmp_path: Path) -> None:
    assert answered_page(RecordedHistory(tmp_path / "none"), b"") == HistoryPage([], "", is_last=True)


@pytest.mark.parametrize(
    ("failure", "expected"), [(LogTrimmed("gone"), LogTrimmed), (ValueError("secret content"), CdcError)]
)
def test_a_failure_is_the_answer(failure: Exception, expected: type[CdcError]) -> None:
    answer = answered_page(FailingHistory(failure), b"\xff")

    assert isinstance(answer, expected)
    assert "secret content" not in str(answer)


def test_without_a_history_the_destination_is_unavailable() -> None:
    assert isinstance(answered_page(None, b""), DestinationUnavailable)
