"""What the destinations of AWS have in common: a client, places that are looked up once, and keyed requests."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Generic, TypeVar

from cdc import failpoint
from cdc.config.destinations import KinesisDelivery, SnsDelivery, SqsDelivery
from cdc.delivery.destinations.aws_client import new_client, refusal_of_entry
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise, refuse
from cdc.delivery.destinations.keyed_requests import KeyedLimits, KeyedRequests, RequestAnswer, RequestEntry
from cdc.errors import CdcError, DestinationUnavailable, EventRefused, EventTooLarge, TopicMissing

SettingsT = TypeVar("SettingsT", bound=SqsDelivery | SnsDelivery | KinesisDelivery)


class AwsDestination(ABC, Generic[SettingsT]):
    """Queues, topics or streams of one service in one region."""

    promise: ClassVar[Promise] = Promise.AT_LEAST_ONCE
    stores_progress: ClassVar[bool] = False
    service: ClassVar[str]
    """Name of the service in AWS's client."""
    longest_name: ClassVar[int]
    """Characters of the name of a queue, topic or stream."""
    entries: ClassVar[int]
    """Events that one request contains at most."""
    request_bytes: ClassVar[int] = 0
    """Bytes that one request contains at most, or the largest event if that is larger."""

    def __init__(self, settings: SettingsT, identity: DeliveryIdentity) -> None:
        del identity
        self._settings = settings
        self._client: Any = None
        self._requests: KeyedRequests | None = None
        self._found: dict[str, str] = {}
        """Name of a queue, topic or stream → its address."""

    def open(self) -> bytes | None:
        """Make the client; it connects when it sends."""
        self.close()
        self._client, self._found = new_client(self.service, self._settings), {}
        size = max(self.request_bytes, self._settings.max_event_size)
        limits = KeyedLimits(self.entries, size, self._settings.parallel)
        self._requests = KeyedRequests(self._post, limits, self._settings.timeout)
        return None

    def check(self, topics: Collection[str]) -> None:
        """Look for the queues, topics or streams of the topics. It needs the rights that sending needs."""
        self._client = new_client(self.service, self._settings)
        try:
            for name in sorted({self._entry(Event("", 0, 0, topic, None, b"")).place for topic in topics}):
                with suppress(*([TopicMissing] if self._settings.create else [])):
                    self._find(name, create=False)
        finally:
            self.close()

    def send(self, events: Sequence[Event]) -> None:
        """Check the events, then let them wait for `commit`, or send them if many wait."""
        requests = self._opened()
        entries = [self._entry(event) for event in events]
        refuse((entry.event, self._refusal(entry)) for entry in entries)
        for name in sorted({entry.place for entry in entries} - self._found.keys()):
            self._found[name] = self._find(name, create=self._settings.create)
        requests.add(entries)

    def commit(self, progress: bytes) -> None:
        """Return when the service has acknowledged every event."""
        del progress
        self._opened().finish()
        failpoint.hit(f"{self.service}_acknowledged")

    def close(self) -> None:
        """Forget the batch and disconnect."""
        if self._requests is not None:
            self._requests.close()
            self._requests = None
        if self._client is not None:
            self._client.close()
            self._client = None

    @abstractmethod
    def _entry(self, event: Event) -> RequestEntry:
        """Return an event as entry of a request."""

    @abstractmethod
    def _find(self, name: str, *, create: bool) -> str:
        """Return the address of a queue, topic or stream; raises TopicMissing if there is none and none is created."""

    @abstractmethod
    def _post(self, place: str, entries: Sequence[RequestEntry]) -> RequestAnswer:
        """Send one request, in any thread."""

    def _opened(self) -> KeyedRequests:
        if self._requests is None:
            raise DestinationUnavailable(f"the client of {self.service!r} is closed")
        return self._requests

    def _refusal(self, entry: RequestEntry) -> CdcError | None:
        most = self._settings.max_event_size
        if len(entry.place) > self.longest_name:
            return EventRefused(
                f"{entry.place!r} is longer than a name in {self.service!r} may be, {self.longest_name} characters",
                remedy="set 'topic' in a rule for the table, then run 'cdc dlq retry SINK'",
            )
        if entry.size > most:
            return EventTooLarge(f"event {entry.event.id!r} has {entry.size} bytes; the delivery sends at most {most}")
        return None


def answer_of(codes: Mapping[int, str], entries: Sequence[RequestEntry]) -> RequestAnswer:
    """Return what the codes of failed entries mean."""
    refused = {
        index: error
        for index, code in codes.items()
        if (error := refusal_of_entry(code, entries[index].event.id)) is not None
    }
    failed = {
        index: DestinationUnavailable(f"events failed again and again, at last with {code!r}")
        for index, code in codes.items()
        if index not in refused
    }
    return RequestAnswer(failed, refused)
