"""Events whose content has a schema in a schema registry, in the wire format of Confluent.

A message is a zero byte, the id of the schema in four bytes, and the content. The subject is `TOPIC-key` or
`TOPIC-value`. A schema is registered when the first event with it is encoded, so a refusal of the registry stops the
delivery before the event is sent.
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final, Protocol, runtime_checkable

import httpx2
import numpy as np
import pyarrow as pa
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError

from cdc.config.deliveries import EventEncoding, SchemaRegistryAccess
from cdc.delivery.formats.avro_codec import AvroCodec
from cdc.delivery.formats.connect_schema import ConnectSchema, SchemaPair
from cdc.delivery.formats.contract import EncodedEvents, Format, LogicalMessages
from cdc.delivery.formats.protobuf_codec import ProtobufCodec
from cdc.delivery.formats.table_changes import TableChanges
from cdc.errors import CdcError, DestinationDenied, DestinationNotTrusted, DestinationUnavailable, EventSchemaRejected
from cdc.table import TableSchema

_MAGIC: Final = b"\0"
_DENIED: Final = frozenset({401, 403})
_REJECTED: Final = frozenset({409, 422})
"""Incompatible with an earlier version; not valid."""


@runtime_checkable
class TypedFormat(Format, Protocol):
    """A format whose events have schemas."""

    def schemas(self, schema: TableSchema, topic: str) -> SchemaPair:
        """Return the schemas of keys and values of a table's events."""

    def message_schemas(self) -> SchemaPair:
        """Return the schemas of keys and values of logical messages."""


class Codec(Protocol):
    """Writes values of one schema in an encoding that has schemas."""

    kind: ClassVar[str]
    """Type of the schema for the registry."""
    prefix: ClassVar[bytes]
    """What a message has between the id of the schema and the content."""
    schema_text: str
    """The schema, for the registry."""

    def encode_all(self, texts: pa.StringArray, start: bytes) -> pa.Array | None:
        """Return `start` and the content of the messages with these JSON texts; None if they need `encode`."""

    def encode(self, value: Any) -> bytes:
        """Return the content of a message; value: parsed from JSON."""


CODECS: Final[Mapping[EventEncoding, Callable[[ConnectSchema], Codec]]] = {
    EventEncoding.AVRO: AvroCodec,
    EventEncoding.PROTOBUF: ProtobufCodec,
}


class RegistryFormat:
    """Encoding of the events of another format in Avro or Protobuf."""

    def __init__(self, inner: TypedFormat, encoding: EventEncoding, access: SchemaRegistryAccess) -> None:
        self._inner = inner
        self._codec = CODECS[encoding]
        self._registry = SchemaRegistry(access)
        self._writers: dict[tuple[str, ConnectSchema], tuple[Codec, bytes]] = {}

    def encode(self, changes: TableChanges) -> EncodedEvents:
        """Encode changes of one table. Raises errors with Reaction.RETRY if the registry does not take a schema."""
        return self._written(
            self._inner.encode(changes), changes.topic, self._inner.schemas(changes.schema, changes.topic)
        )

    def encode_messages(self, messages: LogicalMessages) -> EncodedEvents:
        """Encode logical messages; raises what `encode` raises."""
        return self._written(self._inner.encode_messages(messages), messages.topic, self._inner.message_schemas())

    def record(self, topic: str, schemas: SchemaPair, key: str, value: str) -> tuple[bytes, bytes]:
        """Return key and value of an event that is no change, from their JSON; raises what `encode` raises."""
        texts = zip(("key", "value"), schemas, (key, value), strict=True)
        first, second = (self._content(pa.array([text]), f"{topic}-{part}", schema) for part, schema, text in texts)
        return first[0].as_py(), second[0].as_py()

    def _written(self, events: EncodedEvents, topic: str, schemas: SchemaPair) -> EncodedEvents:
        key, value = schemas
        return replace(
            events,
            keys=self._content(events.keys, f"{topic}-key", key),
            values=self._content(events.values, f"{topic}-value", value),
        )

    def _content(self, texts: pa.StringArray, subject: str, schema: ConnectSchema) -> pa.BinaryArray:
        if texts.null_count == len(texts):
            return pa.nulls(len(texts), pa.binary())
        writer = self._writers.get((subject, schema))
        if writer is None:
            writer = self._writers[subject, schema] = self._writer(subject, schema)
        codec, start = writer
        if (found := codec.encode_all(texts.drop_null(), start)) is not None:
            is_valid = texts.is_valid().to_numpy(zero_copy_only=False)
            return found if is_valid.all() else found.take(pa.array(np.cumsum(is_valid) - 1, mask=~is_valid))
        parsed = (None if text is None else parse_json(text) for text in texts.to_pylist())
        return pa.array([None if value is None else start + codec.encode(value) for value in parsed], pa.binary())

    def _writer(self, subject: str, schema: ConnectSchema) -> tuple[Codec, bytes]:
        """Return the codec of a registered schema, and how each message begins."""
        codec = self._codec(schema)
        number = self._registry.register(subject, codec.schema_text, codec.kind)
        return codec, _MAGIC + number.to_bytes(4, "big") + codec.prefix


def _integer(text: str) -> float:
    # Postgres writes a negative zero so, which is no integer
    return -0.0 if text == "-0" else int(text)


parse_json: Final[Callable[[str], Any]] = json.JSONDecoder(parse_int=_integer).decode
"""Parser of the JSON of events."""


class SchemaRegistry:
    """Client of a schema registry."""

    def __init__(self, access: SchemaRegistryAccess) -> None:
        self._access = access
        self._client: SchemaRegistryClient | None = None

    def register(self, subject: str, schema: str, kind: str) -> int:
        """Return the id of a schema, and register it under the subject if it is new."""
        what = f"subject {subject!r}"
        return int(self._ask(what, lambda client: client.register_schema(subject, Schema(schema, kind))))

    def check(self) -> None:
        """Raise the error of the delivery if the registry does not answer, or refuses the user."""
        self._ask("subjects", lambda client: client.get_subjects(limit=1))

    def _ask(self, what: str, question: Callable[[SchemaRegistryClient], Any]) -> Any:
        try:
            if self._client is None:
                self._client = self._connected()
            return question(self._client)
        except SchemaRegistryError as exc:
            raise self._error(what, exc) from exc
        except (httpx2.HTTPError, OSError) as exc:
            kind_of_error = DestinationNotTrusted if _is_untrusted(exc) else DestinationUnavailable
            raise kind_of_error(f"schema registry {self._access.url}: {exc or type(exc).__name__}") from exc

    def _connected(self) -> SchemaRegistryClient:
        settings: dict[str, Any] = {
            "url": self._access.url,
            "timeout": self._access.timeout,
            "max.retries": 0,  # the delivery loop tries again
        }
        if self._access.user is not None and self._access.password is not None:
            settings["basic.auth.user.info"] = f"{self._access.user}:{self._access.password.current()}"
        if self._access.ca_file is not None:
            settings["ssl.ca.location"] = str(self._access.ca_file)
        return SchemaRegistryClient(settings)

    def _error(self, what: str, error: SchemaRegistryError) -> CdcError:
        reason = f"schema registry {self._access.url}, {what}: {error.error_message}"
        if error.http_status_code in _REJECTED:
            return EventSchemaRejected(reason)
        if error.http_status_code in _DENIED:
            self._client = None  # the password may change
            return DestinationDenied(reason)
        return DestinationUnavailable(reason)


def _is_untrusted(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
