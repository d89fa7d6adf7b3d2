"""Models of the deliveries of a definition: which changes they send, how, and to which destination."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.condition_syntax import Condition
from cdc.config.field_types import (
    Glob,
    Identifier,
    Location,
    Model,
    Name,
    Switch,
    Whole,
    invalid,
    only_placeholders,
    placeholders,
)
from cdc.config.secret import ReferencedSecret
from cdc.config.transform import Transform
from cdc.config.units import Seconds
from cdc.config.views import with_views


class EventFormat(StrEnum):
    """What an event looks like."""

    #: Debezium's envelope with key, as its JSON converter writes it.
    DEBEZIUM = "debezium"
    #: The complete change, lossless: operation, position, both row images as text, unsent columns.
    CDC = "cdc"
    #: Only the row, as Debezium's ExtractNewRecordState writes it.
    FLAT = "flat"
    #: CloudEvents 1.0 in structured mode, with the format `cdc` as content.
    CLOUDEVENTS = "cloudevents"


class EventEncoding(StrEnum):
    """How the content of an event is written."""

    #: JSON text.
    JSON = "json"
    #: Avro with a schema of a schema registry, in the wire format of Confluent.
    AVRO = "avro"
    #: Protobuf with a schema of a schema registry, in the wire format of Confluent.
    PROTOBUF = "protobuf"


class SchemaRegistryAccess(Model):
    """Access to a schema registry with the API of Confluent; requires the package extra `registry`."""

    url: Annotated[str, Field(pattern=r"^https?://[^\s/@]+(/[^\s]*)?$")]
    """URL of the registry, for example `https://registry.example.com:8081`."""
    user: Annotated[str, Field(min_length=1)] | None = None
    """Name of the user for basic authentication."""
    password: ReferencedSecret | None = None
    """Password of the user, as a reference such as `${VAR}`."""
    ca_file: Location | None = None
    """PEM file with the certificate authority of the registry; default: the authorities of the system."""
    timeout: Annotated[Seconds, Field(gt=0)] = 30.0
    """How long to wait for an answer."""

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.user is None) != (self.password is None):
            raise invalid("'user' and 'password' belong together")
        return self


class StartAt(StrEnum):
    """Where a new delivery begins."""

    #: With the state of every row that the log has, and every change after it.
    EARLIEST = "earliest"
    #: With the first change after the delivery was started.
    LATEST = "latest"


def _row_topic(text: str) -> str:
    placeholders(text)
    return text


class DroppedEvents(Model):
    """Policy that drops events that are too old while a delivery is behind."""

    older_than: Annotated[Seconds, Field(gt=0)]
    """Age of a change, from its commit, above which it is not sent. Each range of dropped changes is counted and
    reported by one event."""


class Drop(Model):
    """Overload policy that drops events; nothing is dropped without it."""

    drop: DroppedEvents


class Overload(StrEnum):
    """What a delivery does while it is behind."""

    #: Send every change; the log is the buffer.
    WAIT = "wait"
    #: Send only the newest change of each key among those that wait.
    LATEST = "latest"


class MessageTopic(Model):
    """Logical messages (`pg_logical_emit_message`) that a delivery sends."""

    prefix: Annotated[str, Field(min_length=1)]
    """Glob over the prefix of the message, for example `orders.*`."""
    topic: Annotated[str, Field(min_length=1), only_placeholders("pipeline", "prefix")]
    """Topic of the events; `{pipeline}` and `{prefix}` are replaced."""
    key: Annotated[str, Field(min_length=1)] | None = None
    """Field of the content, a JSON object, whose text is the key of the event; default: the prefix, as in Debezium."""


class Outbox(Model):
    """A table whose inserted rows are events; the default columns are those of Debezium's outbox event router."""

    table: Annotated[str, Field(pattern=r"^[^.]+\.[^.]+$")]
    """The outbox table, `schema.table`. Updates and deletes of its rows are ignored."""
    id: Identifier = "id"
    """Column with the id of the event, which becomes the header `id`."""
    type: Identifier = "aggregatetype"
    """Column that selects the topic."""
    key: Identifier = "aggregateid"
    """Column with the key of the event."""
    event_type: Identifier | None = "type"
    """Column with the type of the event, which becomes the header `eventType`; none if the table has no such column."""
    payload: Identifier = "payload"
    """Column with the content of the event; json is sent as it is, bytea as bytes, and null as a tombstone."""
    topic: Annotated[str, Field(min_length=1), only_placeholders("pipeline", "type")] = "outbox.event.{type}"
    """Topic of the events; `{pipeline}` and `{type}` are replaced, the second by the value of the column `type`."""
    headers: Mapping[str, Identifier] = {}
    """Additional headers: name of the header → column."""


class DeliveryRule(Model):
    """Settings for the tables that a glob matches."""

    match: Glob
    """Glob over `schema.table`; the first rule that matches a table applies to it."""
    topic: Annotated[str, Field(min_length=1), AfterValidator(_row_topic)] | None = None
    """Topic of the events, instead of the delivery's; every column of the table is a placeholder, too."""
    key: tuple[Identifier, ...] = ()
    """Columns that are the key of the events; default the primary key. Only events of one key stay in order."""
    headers: Mapping[str, Identifier] = {}
    """Additional headers: name of the header → column."""
    when: Condition | None = None
    """Condition in a subset of Spark SQL over `op` and the columns of both images, for example
    `after.status <> before.status`; only changes for which it is true are sent. `before` needs REPLICA IDENTITY FULL;
    of a delete, `after` is null."""
    transform: Transform | None = None
    """Transformation of the rows before they are encoded: `drop`, `rename` and `mask`."""

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.transform is not None and (self.transform.needs_spark or self.transform.python is not None):
            raise invalid("a delivery runs without Spark: 'transform' can have 'drop', 'rename' and 'mask'")
        return self


class DebeziumSettings(Model):
    """Options of the format `debezium`; names and defaults are those of Debezium's connector."""

    schemas: Switch = True
    """Whether every key and value contains its schema (`converter.schemas.enable`)."""
    decimal: Literal["precise", "string", "double"] = "precise"
    """How numeric values are written (`decimal.handling.mode`)."""
    time: Literal["adaptive", "adaptive_time_microseconds", "connect", "isostring"] = "adaptive"
    """How dates and times are written (`time.precision.mode`)."""
    interval: Literal["numeric", "string"] = "numeric"
    """How intervals are written (`interval.handling.mode`)."""
    hstore: Literal["json", "map"] = "json"
    """How hstore values are written (`hstore.handling.mode`)."""
    bytes: Literal["base64", "base64-url-safe", "hex", "bytes"] = "bytes"
    """How bytea values are written (`binary.handling.mode`); `bytes` is base64 in JSON."""
    tombstones: Switch = True
    """Whether a delete is followed by an event without value (`tombstones.on.delete`)."""
    transaction: Switch = False
    """Whether the envelope has the block `transaction`, and the topic `{pipeline}.transaction` has records of the begin
    and end of each transaction (`provide.transaction.metadata`)."""


class DeliverySettings(Model):
    """Settings that every delivery has."""

    name: Name
    """Name of the delivery, unique among the sinks and deliveries of the pipeline."""
    tables: tuple[Glob, ...] = ("*.*",)
    """Globs over `schema.table` of the captured tables whose changes are sent; default all, `[]` none."""
    views: tuple[Glob, ...] = ()
    """Globs over `schema.table` of the views whose changes are sent, instead of those of tables; default none."""
    messages: tuple[MessageTopic, ...] = ()
    """Logical messages to send; the first entry that matches a prefix applies."""
    outbox: Outbox | None = None
    """Outbox table, whose rows are sent as events; default none."""
    topic: Annotated[str, Field(min_length=1), only_placeholders("pipeline", "schema", "table")] = (
        "{pipeline}.{schema}.{table}"
    )
    """Topic of the events of a table; `{pipeline}`, `{schema}` and `{table}` are replaced."""
    format: EventFormat = EventFormat.CDC
    """Format of the events: `debezium`, `cdc`, `flat` or `cloudevents`."""
    debezium: DebeziumSettings = DebeziumSettings()
    """Options of the formats `debezium` and `flat`."""
    encoding: EventEncoding = EventEncoding.JSON
    """How events are written: `json`, or `avro` or `protobuf` with a schema registry."""
    schema_registry: SchemaRegistryAccess | None = None
    """Registry for the schemas of events that are not JSON."""
    rules: tuple[DeliveryRule, ...] = ()
    """Settings for single tables; the first rule that matches a table applies."""
    start: StartAt = StartAt.EARLIEST
    """Where a new delivery begins: `earliest` or `latest`."""
    on_overload: Overload | Drop = Overload.WAIT
    """What happens while the delivery is behind: `wait` sends everything, `latest` only the newest change of each key,
    `{drop: {older_than: 10m}}` nothing that is older."""
    batch: Annotated[Whole, Field(ge=1, le=100_000)] = 10_000
    """Maximum number of changes between two commits; a larger transaction is sent as a whole."""
    stop_at: Annotated[Whole, Field(ge=0, le=10_000)] = 1_000
    """Number of dead-letter keys above which the delivery stops; 0 stops it at the first refused event."""

    @property
    def is_acknowledged(self) -> bool:
        """Whether an event counts as delivered only when its receiver or its broker has answered."""
        return True

    @property
    def is_run_by_hand(self) -> bool:
        """Whether only `cdc deliver NAME` runs the delivery, not `cdc run`."""
        return False

    @property
    def has_topics(self) -> bool:
        """Whether the events of a table have a topic."""
        return True

    @property
    def own_directory(self) -> str:
        """Local directory that no other delivery may share; empty if there is none."""
        return ""

    @property
    def counted_tables(self) -> tuple[str, ...]:
        """Globs of the tables that the metrics of the delivery count; empty if it has no metrics."""
        return ()

    @model_validator(mode="after")
    def _views_or_tables(self) -> Self:
        return with_views(self)

    @model_validator(mode="after")
    def _debezium_has_an_effect(self) -> Self:
        if "debezium" not in self.model_fields_set:
            return self
        if self.format not in {EventFormat.DEBEZIUM, EventFormat.FLAT}:
            raise invalid(
                "'debezium' has no effect under the format {format}: remove it, or choose 'debezium' or 'flat'",
                format=repr(self.format.value),
            )
        if self.format is EventFormat.FLAT and self.debezium.transaction:
            raise invalid("'debezium.transaction' has no effect under the format 'flat': choose the format 'debezium'")
        return self

    @model_validator(mode="after")
    def _encodable(self) -> Self:
        if self.encoding is EventEncoding.JSON:
            if self.schema_registry is not None:
                raise invalid("'schema_registry' has no effect on JSON: remove it, or choose 'encoding'")
            return self
        if self.schema_registry is None:
            raise invalid(
                "'schema_registry' is required: events in {encoding} have their schemas there",
                encoding=self.encoding.value,
            )
        if self.format is EventFormat.CLOUDEVENTS:
            raise invalid("the format 'cloudevents' is JSON: choose the format 'cdc', 'debezium' or 'flat'")
        return self
