"""Requests to a delivery from the command line and the API to pause, resume and continue after another position."""

from __future__ import annotations

import time
from threading import Event
from typing import Final

from cdc.catalog import Catalog, CommandState
from cdc.catalog.pause_requests import PauseRequests

DELIVERY_PAUSES: Final = PauseRequests("pause_delivery", "delivery")
REWIND_DELIVERY: Final = "rewind_delivery"
"""Kind of the command that lets a delivery continue after another position.

Its payload is {"delivery": name, "position": text}; its result is {} or {"error": an error as JSON}.
"""
ANSWER_WITHIN: Final = 5.0
"""Seconds to wait until the process of a delivery has answered a request; it looks every second."""
_POLL: Final = 0.1


def request_rewind(catalog: Catalog, pipeline: str, delivery: str, position: str, actor: str) -> int:
    """Ask the process of a delivery to continue after another position, and return the number of the command."""
    number = catalog.commands.post(pipeline, REWIND_DELIVERY, {"delivery": delivery, "position": position})
    catalog.audit.write(actor, "delivery rewind", pipeline, {"delivery": delivery, "position": position})
    return number


def await_rewind(catalog: Catalog, number: int, patience: float = ANSWER_WITHIN) -> bool:
    """Wait until the process has carried out a rewind; return False if it has not after `patience` seconds."""
    deadline, never = time.monotonic() + patience, Event()
    while (command := catalog.commands.get(number)) is not None and command.state is CommandState.PENDING:
        if time.monotonic() >= deadline:
            return False
        never.wait(_POLL)
    return True
