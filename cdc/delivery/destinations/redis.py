"""Destination in Redis Streams: exactly once, because a batch and its progress are one transaction of Redis.

Each event is an entry of the stream that has the topic's name. `MULTI` begins a batch, each event is queued by an
`XADD`, and `EXEC` adds all of them and stores the progress. Redis keeps the queued commands in memory until then, and
drops them when the connection ends. `WATCH` on the state of the delivery makes `EXEC` fail if another process has
opened the delivery since the batch began.

Redis does not roll back: if one command of `EXEC` fails, the others are done. So the script that stores the progress
does so only if the last event of each stream is there.

A transaction is in the append-only file as a whole or not at all. A crash of Redis, or a change to a replica, may lose
the last batches that it acknowledged (`appendfsync everysec`), but with them it loses their progress. They are then
sent again, and are there once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, ClassVar, Final
from urllib.parse import urlsplit

from redis.connection import Connection, SSLConnection
from redis.exceptions import (
    AuthenticationError,
    AuthenticationWrongNumberOfArgsError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from cdc.config.destinations import RedisDelivery
from cdc.delivery.destinations.broker_connection import address, connection_error
from cdc.delivery.destinations.contract import DeliveryIdentity, Event, Promise, refuse
from cdc.errors import (
    CdcError,
    DeliveryFenced,
    DestinationDenied,
    DestinationFull,
    DestinationUnavailable,
    EventRefused,
    EventTooLarge,
)
from cdc.failpoint import hit

PREFIX: Final = "cdc:delivery:"
"""Beginning of the keys with the state of deliveries: a hash with `generation` and `progress`."""
HEADER_PREFIX: Final = "header:"
"""Beginning of the fields of an entry that are headers."""
AT_ONCE: Final = 500
"""Commands that are sent before their answers are read."""
_ENTRY_OVERHEAD: Final = 200
"""Bytes that a queued command needs besides its texts, about."""
_STORE: Final = """
for number = 2, #KEYS do
    local last = redis.pcall('XREVRANGE', KEYS[number], '+', '-', 'COUNT', 1)
    if last.err then
        return redis.error_reply(last.err)
    end
    if not last[1] or last[1][2][2] ~= ARGV[number] then
        return redis.error_reply('ERR the last event of a stream is not there')
    end
end
redis.call('HSET', KEYS[1], 'progress', ARGV[1])
return 'OK'
"""
"""KEYS: the state, and the streams of the batch; ARGV: the progress, and the id of the last event of each stream."""


class RedisDestination:
    """Adds events to streams."""

    promise: ClassVar = Promise.EXACTLY_ONCE
    stores_progress: ClassVar = True

    def __init__(self, settings: RedisDelivery, identity: DeliveryIdentity) -> None:
        self._settings = settings
        self._state = f"{PREFIX}{identity}"
        self._client = f"cdc-delivery-{identity}"
        host, port, self._is_secure = address(settings.url, 6379, 6379)
        self._address = host, port
        self._place = f"{host}:{port}"
        self._trim: tuple[object, ...] = () if settings.max_length is None else ("MAXLEN", "~", settings.max_length)
        self._connection: Any = None
        self._checks: Any = None
        """Second connection, for commands that need their answer while a batch is queued."""
        self._generation = 0
        self._begin_batch()
        self._known: set[str] = set()
        """Topics whose keys can be streams."""

    def open(self) -> bytes | None:
        """Connect, fence every other process of this delivery, and return the progress."""
        self._connection, self._checks = self._connect(), self._connect()
        self._known = set()
        self._begin_batch()
        commands = [("HINCRBY", self._state, "generation", 1), ("HGET", self._state, "progress")]
        answers = self._ask(self._connection, [("MULTI",), *commands, ("EXEC",)])
        generation, progress = answers[-1]
        self._generation = int(generation)
        stored: bytes | None = progress
        return stored

    def check(self, topics: Collection[str]) -> None:
        """Connect, and check that the keys of the topics are streams, or free."""
        try:
            self._checks = self._connect()
            self._check_types(set(topics))
        finally:
            self.close()

    def send(self, events: Sequence[Event]) -> None:
        """Queue the events in Redis."""
        self._check(events)
        self._begin()
        for first in range(0, len(events), AT_ONCE):
            self._ask(self._opened, [self._entry(event) for event in events[first : first + AT_ONCE]])
        self._last.update((event.topic, event.id) for event in events)

    def commit(self, progress: bytes) -> None:
        """Add the queued events and store the progress, in one step."""
        self._begin()
        streams = list(self._last)
        script = ("EVAL", _STORE, len(streams) + 1, self._state, *streams, progress, *self._last.values())
        hit("redis_queued")
        answers = self._ask(self._opened, [script, ("EXEC",)])
        hit("redis_executed")
        self._begin_batch()
        if answers[-1] is None:
            raise self._fenced(self._stored_generation())
        if failed := [answer for answer in answers[-1] if isinstance(answer, ResponseError)]:
            raise self._error(failed[0])

    def close(self) -> None:
        """Disconnect; Redis drops the queued events."""
        for connection in (self._connection, self._checks):
            if connection is not None:
                connection.disconnect()
        self._connection = self._checks = None

    @property
    def _opened(self) -> Any:
        assert self._connection is not None  # noqa: S101 - the contract: opened before
        return self._connection

    def _begin_batch(self) -> None:
        self._is_begun, self._bytes = False, 0
        self._last: dict[str, str] = {}
        """Topic of each stream of the batch → id of its last event."""

    def _begin(self) -> None:
        """Begin the transaction, unless it has begun. Raises DeliveryFenced if another process has opened since."""
        if self._is_begun:
            return
        ask = [("WATCH", self._state), ("HGET", self._state, "generation")]
        found = self._ask(self._opened, ask)[-1]
        if found is None or int(found) != self._generation:
            raise self._fenced(found)
        self._ask(self._opened, [("MULTI",)])
        self._is_begun = True

    def _fenced(self, found: bytes | None) -> CdcError:
        """Return the error for a state that has changed."""
        if found is None or int(found) <= self._generation:
            return DestinationUnavailable(
                f"key {self._state!r} was removed from {self._place}, or changed",
                remedy="choose the maxmemory-policy 'noeviction'; the delivery continues with the progress it finds",
            )
        return DeliveryFenced(f"another process sends this delivery to {self._place}")

    def _stored_generation(self) -> bytes | None:
        found: bytes | None = self._ask(self._opened, [("HGET", self._state, "generation")])[0]
        return found

    def _check(self, events: Sequence[Event]) -> None:
        """Raise EventsRefused for events that Redis cannot take, and an error if the batch becomes too large."""
        refuse((event, self._refusal(event)) for event in events)
        self._bytes += sum(map(_size, events))
        if self._bytes > self._settings.max_batch:
            raise DestinationUnavailable(
                f"a batch has more than {self._settings.max_batch:,} bytes, and Redis takes it as a whole",
                remedy="raise 'client-query-buffer-limit' of Redis, then 'max_batch' of the delivery to 90% of it",
            )
        self._check_types({event.topic for event in events} - self._known)

    def _refusal(self, event: Event) -> CdcError | None:
        if event.topic.startswith(PREFIX):
            return EventRefused(f"the topic of event {event.id!r} begins with {PREFIX!r}, as the state of deliveries")
        if _size(event) > self._settings.max_batch:
            return EventTooLarge(f"event {event.id!r} is larger than a batch may be ('max_batch')")
        return None

    def _check_types(self, topics: set[str]) -> None:
        """Raise an error if the key of a topic is something else than a stream."""
        assert self._checks is not None  # noqa: S101 - the contract: opened before
        ordered = sorted(topics)
        for first in range(0, len(ordered), AT_ONCE):
            chosen = ordered[first : first + AT_ONCE]
            for topic, kind in zip(chosen, self._ask(self._checks, [("TYPE", topic) for topic in chosen]), strict=True):
                if kind not in {b"none", b"stream"}:
                    raise DestinationUnavailable(
                        f"key {topic!r} at {self._place} is no stream, but a {kind.decode()}",
                        remedy="choose another topic in a rule, or rename the key",
                    )
        self._known |= topics

    def _entry(self, event: Event) -> tuple[object, ...]:
        fields: list[object] = ["XADD", event.topic, *self._trim, "*", "id", event.id]
        if event.key is not None:
            fields += ("key", event.key)
        if event.value is not None:
            fields += ("value", event.value)
        for name, value in event.headers:
            fields += (HEADER_PREFIX + name, value)
        return tuple(fields)

    def _connect(self) -> Any:
        settings = self._settings
        (host, port), path = self._address, urlsplit(settings.url).path.removeprefix("/")
        options: dict[str, Any] = {
            "host": host,
            "port": port,
            "db": int(path or 0),
            "username": settings.user,
            "password": settings.password.current() if settings.password else None,
            "socket_timeout": settings.timeout,
            "socket_connect_timeout": settings.timeout,
            "client_name": self._client,
            "driver_info": None,
            "protocol": 2,
        }
        kind: Any = SSLConnection if self._is_secure else Connection
        if self._is_secure:
            files = (settings.ca_file, settings.cert_file, settings.key_file)
            options |= dict(zip(("ssl_ca_certs", "ssl_certfile", "ssl_keyfile"), files, strict=True))
        try:
            connection = kind(**options)
            connection.connect()
        except (RedisError, OSError) as exc:
            raise self._error(exc) from exc
        return connection

    def _ask(self, connection: Any, commands: Iterable[tuple[object, ...]]) -> list[Any]:
        """Send commands, and return their answers. Raises the first error among them."""
        if not connection.is_connected:
            # the library would connect again, without the transaction
            raise DestinationUnavailable(f"the connection to {self._place} is closed")
        listed = list(commands)
        try:
            connection.send_packed_command(connection.pack_commands(listed))
            return [connection.read_response() for _ in listed]
        except (RedisError, OSError) as exc:
            raise self._error(exc) from exc

    def _error(self, exc: Exception) -> CdcError:
        text = str(exc)
        denied = (AuthenticationError, AuthenticationWrongNumberOfArgsError, AuthorizationError, NoPermissionError)
        if isinstance(exc, denied) or text.startswith("NOAUTH"):
            return DestinationDenied(f"{self._place} refuses the user, the password or a command: {text}")
        is_lost = isinstance(exc, RedisConnectionError | RedisTimeoutError | OSError)
        if is_lost and not isinstance(exc, BusyLoadingError):
            return connection_error(exc, self._place)
        if "cluster" in text.lower() or text.startswith(("MOVED", "CROSSSLOT")):
            return DestinationUnavailable(
                f"{self._place} is a Redis Cluster, which has no transactions over several keys",
                remedy="use a Redis server that is no cluster",
            )
        kind = DestinationFull if "maxmemory" in text else DestinationUnavailable
        return kind(f"{self._place} answers: {text}")


def _size(event: Event) -> int:
    """Return the bytes that Redis keeps for a queued event, about."""
    headers = sum(len(name) + len(value) + 32 for name, value in event.headers)
    return len(event.key or b"") + len(event.value or b"") + len(event.topic) + headers + _ENTRY_OVERHEAD
