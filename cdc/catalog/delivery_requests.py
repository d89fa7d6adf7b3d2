"""Requests to a delivery from the command line and the API: pause, resume and rewind.

A pause is a command that stays pending until somebody resumes the delivery, so it survives a restart of the process.
"""

from __future__ import annotations

import time
from threading import Event
from typing import Final

from cdc.catalog import Catalog, Command, CommandState

PAUSE_DELIVERY: Final = "pause_delivery"
"""Kind of the command that pauses a delivery while it is pending; its payload is {"delivery": name}."""
REWIND_DELIVERY: Final = "rewind_delivery"
"""Kind of the command that lets a delivery continue after another position.

Its payload is {"delivery": name, "position": text}; its result is {} or {"error": an error as JSON}.
"""
ANSWER_WITHIN: Final = 5.0
"""Seconds to wait until the process of a delivery has answered a request; it looks every second."""
_POLL: Final = 0.1


def pause_of(catalog: Catalog, pipeline: str, delivery: str) -> Command | None:
    """Return the command that pauses a delivery at present; None if the delivery is not paused."""
    pending = catalog.commands.pending(pipeline, PAUSE_DELIVERY)
    return next((command for command in pending if command.payload["delivery"] == delivery), None)


def pause(catalog: Catalog, pipeline: str, delivery: str, actor: str) -> bool:
    """Pause a delivery; return False if it is paused already."""
    if pause_of(catalog, pipeline, delivery) is not None:
        return False
    catalog.commands.post(pipeline, PAUSE_DELIVERY, {"delivery": delivery})
    catalog.audit.write(actor, "delivery pause", pipeline, {"delivery": delivery})
    return True


def resume(catalog: Catalog, pipeline: str, delivery: str, actor: str) -> bool:
    """Let a paused delivery continue; return False if it is not paused."""
    command = pause_of(catalog, pipeline, delivery)
    if command is None:
        return False
    catalog.commands.finish(command.id, {})
    catalog.audit.write(actor, "delivery resume", pipeline, {"delivery": delivery})
    return True


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
