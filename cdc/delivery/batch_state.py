"""State of the batch that a delivery sends: the windows of the log between two commits.

| state | what happens | next state | what the loop does |
|---|---|---|---|
| Idle | the log has nothing new | Idle | stores a progress without events, if that is due |
| Idle | a window is read | OneWindow | sends it |
| OneWindow, SeveralWindows | a window is sent, the batch may grow, the log has more | SeveralWindows | sends the next |
| OneWindow, SeveralWindows | the batch is committed | Idle | continues after it |
| OneWindow | events are refused | OneWindow | opens the destination again, sends all but their keys |
| OneWindow | any other error | Idle | raises it |
| SeveralWindows | events are refused, or an error that does not halt | Idle | opens the destination again, and |
|  |  |  | continues from the progress there, with each of the windows alone |
| SeveralWindows | an error that halts | Idle | raises it |
| any | a rewind | Idle | stores the new progress |

A batch of several windows keeps only its last one, so its refused events are found when the windows are sent again.
After an error that the loop raises, it is closed and another one is opened.

The states are values: they know no destination, no file and no clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cdc.delivery.destinations.contract import EventsRefused
from cdc.delivery.event_source import EventWindow
from cdc.delivery.progress import ZERO
from cdc.errors import CdcError, DestinationUnavailable, Reaction
from cdc.position import Position

MOST_UNNAMED: Final = 1_000
"""Maximum number of refusals of one window that name no event.

Kafka names the refused events of one topic after another, and each topic needs such a refusal.
"""


@dataclass(frozen=True, slots=True)
class Idle:
    """No window is sent; the next step reads one."""

    alone_upto: Position = ZERO
    """End of the windows of a batch that failed: each is committed alone.

    Then the windows before the failed one are delivered, and it is known which window has the refused events.
    """

    def begin(self, window: EventWindow) -> OneWindow:
        """Return the state in which a window is sent."""
        return OneWindow(window, self.alone_upto)


@dataclass(frozen=True, slots=True)
class OneWindow:
    """One window is sent, perhaps again because the destination refused events of it."""

    window: EventWindow
    alone_upto: Position = ZERO
    """As in Idle."""
    refused: Mapping[str, CdcError] = field(default_factory=dict)
    """Id of each event that the destination refused when the window was sent last → the reason."""
    unnamed: int = 0
    """Number of refusals of this window, one after the other, that named no event."""

    @property
    def may_grow(self) -> bool:
        """Whether the next window may be sent in the same batch."""
        return self.window.upto > self.alone_upto and not self.window.window.is_last

    def add(self, window: EventWindow) -> SeveralWindows:
        """Return the state in which the next window is sent in the same batch."""
        return SeveralWindows(window)

    def commit(self) -> Idle:
        """Return the state after the batch is committed."""
        return Idle(self.alone_upto)

    def recover(self, error: EventsRefused | CdcError) -> OneWindow:
        """Return the state in which the window is sent again after a refusal; raises any other error.

        Raises DestinationUnavailable after MOST_UNNAMED refusals without a named event.
        """
        if isinstance(error, CdcError):
            raise error
        unnamed = 0 if error.refused else self.unnamed + 1
        if unnamed > MOST_UNNAMED:
            raise unnamed_refusal(f"events up to position {self.window.upto!s}") from error
        return replace(self, refused=error.refused, unnamed=unnamed)


@dataclass(frozen=True, slots=True)
class SeveralWindows:
    """Several windows are sent in one batch."""

    window: EventWindow
    """The last of them."""

    @property
    def may_grow(self) -> bool:
        """Whether the next window may be sent in the same batch."""
        return not self.window.window.is_last

    def add(self, window: EventWindow) -> SeveralWindows:
        """Return the state in which the next window is sent in the same batch."""
        return SeveralWindows(window)

    def commit(self) -> Idle:
        """Return the state after the batch is committed."""
        return Idle()

    def recover(self, error: EventsRefused | CdcError) -> Idle:
        """Return the state in which the windows are read again, each for its own batch; raises errors that halt."""
        if isinstance(error, CdcError) and error.reaction is Reaction.HALT:
            raise error
        return Idle(self.window.upto)


SentBatch = OneWindow | SeveralWindows
BatchState = Idle | SentBatch


def unnamed_refusal(events: str) -> CdcError:
    """Return the error for a destination that refuses events again and again, and never names one."""
    return DestinationUnavailable(
        f"the destination refuses {events} and does not say which",
        remedy="look for the reason in the log of the destination",
    )
