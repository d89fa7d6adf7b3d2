"""Pages of the history for receivers that ask for them by a socket: every request has an answer."""

from __future__ import annotations

from typing import Final

from cdc.delivery.destinations.contract import EventHistory, HistoryPage
from cdc.errors import CdcError, DestinationUnavailable, as_cdc_error

MOST_EVENTS: Final = 1_000
"""Events of one page."""


def answered_page(history: EventHistory | None, start: bytes) -> HistoryPage | CdcError:
    """Return the events after `start`, or the error that the receiver gets; raises nothing."""
    if history is None:
        return DestinationUnavailable("the process that sends has no history")
    try:
        return history.page(start.decode(errors="replace"), MOST_EVENTS)
    except CdcError as exc:
        return exc
    except Exception as exc:  # noqa: BLE001 - a receiver must not end the delivery
        return as_cdc_error(exc, "the history of a delivery")
