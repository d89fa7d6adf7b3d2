"""Contract of a destination: what the delivery loop calls, in which order, and what each call promises.

The loop owns order, retries, dead letters and progress. A destination owns the client of one broker, file or socket,
and nothing else. Calls come from one thread, in this order:

    open ─► (send* ─► commit)* ─► close        after an error: close, then open again

A **batch** is everything between two commits: the events of whole source transactions, in log order, in one or more
calls of `send`. *Sent* is not *acknowledged*: only when `commit` returns, the destination has every event of the batch
durably, as far as it has durable storage at all.

A process may die at any point. The next one opens the destination and sends again everything after the progress that
was stored last. So a destination that stores the progress together with the events, in one atomic step, delivers
exactly once. Every other one delivers at least once, and an event that is sent again has the same id.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol, runtime_checkable

from cdc.errors import CdcError

if TYPE_CHECKING:  # at runtime it would load pyarrow, and the server imports this module
    from cdc.delivery.formats.contract import Headers

ID_HEADER: Final = "cdc.id"
"""Header with the id of the event."""
POSITION_HEADER: Final = "cdc.position"
"""Header with the position of the source transaction, as text."""
XID_HEADER: Final = "cdc.xid"
"""Header with the transaction id of the source transaction."""


class Promise(StrEnum):
    """How often a destination delivers each event."""

    #: A consumer sees each event once, also after a crash at any point.
    EXACTLY_ONCE = "exactly once"
    #: No event is missing; after a crash or a lost connection some events are sent again, with the same id.
    AT_LEAST_ONCE = "at least once"
    #: The transport loses events without notice; cdc sends each of them.
    AT_MOST_ONCE = "at most once"


class Event(NamedTuple):
    """One message for a destination, encoded."""

    id: str
    """`LOG ID/POSITION/ORDINAL`; the same for ever, also in a replay. `/tombstone` follows for a tombstone."""
    position: int
    ordinal: int
    topic: str
    """Topic, subject, stream, routing key or queue."""
    key: bytes | None
    """Key that decides about order: events of one topic with equal keys stay in order; None: the event has no key."""
    value: bytes | None
    """Content; None for a tombstone."""
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class DeliveryIdentity:
    """What distinguishes a delivery from every other one that uses the same destination."""

    pipeline: str
    name: str
    """Name of the delivery."""
    log_id: str

    def __str__(self) -> str:
        return f"{self.pipeline}.{self.name}"


@runtime_checkable
class Destination(Protocol):
    """A place that takes the events of one delivery.

    The constructor gets the model of the delivery and its DeliveryIdentity; it neither connects nor fails.
    """

    promise: ClassVar[Promise]
    stores_progress: ClassVar[bool]
    """True if `commit` stores the progress with the events, in one atomic step, and `open` returns it."""

    def open(self) -> bytes | None:
        """Connect, and return the stored progress; None if there is none, or if the destination stores none.

        Raises ProgressLost or ProgressDamaged if it finds that events were delivered of which the progress says
        nothing. Nothing that is there is changed, and `commit` may follow, which begins a new progress.

        When the call returns, no other process can commit to this destination as this delivery any more, if the
        destination stores progress.
        """

    def send(self, events: Sequence[Event]) -> None:
        """Send events after all earlier ones of the batch; the call may return before they are acknowledged.

        The events may be EventColumns, whose columns a destination can read instead. The call must not read or keep the
        sequence after it has returned, unless it copies it. Raises EventsRefused if the destination cannot take single
        events, for example because they are too large. Raises an error with Reaction.RETRY if the destination cannot be
        reached; the loop then closes and opens the destination, and sends the batch again from its beginning.
        """

    def commit(self, progress: bytes) -> None:
        """Return when every event since the last commit is acknowledged and, if it is stored here, the progress too.

        A batch without events is committed too. Raises what `send` raises.
        """

    def close(self) -> None:
        """Disconnect. Events that were not committed are not made visible if the destination stores progress.

        The call does not fail and does not wait for a destination that does not answer.
        """


class EventsRefused(Exception):
    """The destination refuses single events of a batch for a reason that a retry does not change.

    It has not delivered a later event of the same topic and key after a refused one. The loop makes the events dead
    letters. Then, unless `others_acknowledged` is set, it sends the rest of the batch again from its beginning, after
    `close` and `open`.
    """

    def __init__(self, refused: Mapping[str, CdcError], *, others_acknowledged: bool = False) -> None:
        super().__init__(f"{len(refused)} events were refused")
        self.refused = refused
        """Id of a refused event → the reason; empty if the destination finds out which when the batch comes again."""
        self.others_acknowledged = others_acknowledged
        """True if all other events of the batch are acknowledged; only if the destination stores no progress."""


def refuse(checked: Iterable[tuple[Event, CdcError | None]]) -> None:
    """Raise EventsRefused if one of the events has a reason."""
    if refused := {event.id: reason for event, reason in checked if reason is not None}:
        raise EventsRefused(refused)


class HistoryPage(NamedTuple):
    """Some events of the log, in order."""

    events: Sequence[Event]
    next: str
    """Where the next page begins."""
    is_last: bool
    """True if the log had no later event."""


class EventHistory(Protocol):
    """The events of a delivery, read from the log again, with the same ids; any one thread at a time may use it."""

    def page(self, after: str, most: int) -> HistoryPage:
        """Return up to `most` events that follow an event or a page.

        after: the id of an event, `next` of a page, or empty for everything that the log has. Raises a CdcError if the
        log does not have the changes any more, or if `after` is none of these.
        """


@runtime_checkable
class CollectsWindows(Protocol):
    """A destination for which the end of a batch is expensive: while it is behind, a batch has several windows."""

    collect_seconds: ClassVar[float]
    """Time from the beginning of a batch, after which no other window is added to it."""


@runtime_checkable
class ChecksAccess(Protocol):
    """A destination that has a server or a directory, which `cdc doctor` checks while another process may send."""

    def check(self, topics: Collection[str]) -> None:
        """Connect and disconnect, instead of `open`. Raises the error for which the delivery would wait or stop.

        The call sends and creates nothing, and neither fences nor disconnects another process of the delivery. Raises
        TopicMissing for one of the topics that is missing and would not be created, as far as the delivery may see it.
        """


@runtime_checkable
class ServesHistory(Protocol):
    """A destination whose receivers ask for events that the transport has lost."""

    def serve_history(self, history: EventHistory) -> None:
        """Take the history; called once, before `open`. The destination uses it until `close`."""
