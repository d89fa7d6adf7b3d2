"""Models of a definition file: source, tables, snapshot, log, sinks, Spark, catalog and service of one pipeline.

Every model is frozen and rejects unknown keys. The docstring under a field is its description in the JSON schema,
in an editor and in the reference. Validation turns durations into seconds and sizes into bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationInfo,
    model_validator,
)

from cdc.bucket_files import Root
from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.config.destinations import Delivery
from cdc.config.documents import Document
from cdc.config.field_types import (
    Glob,
    Location,
    Model,
    Name,
    Whole,
    absolute_path,
    invalid,
    is_remote,
    sibling_path,
)
from cdc.config.object_store import Storage, log_root
from cdc.config.secret import HIDDEN, Secret
from cdc.config.sinks import DefinedSink, has_tables_and_views, queried_sinks, with_views_apart
from cdc.config.source import Snapshot, Source
from cdc.config.units import Bytes, Seconds, SecondsOrOff
from cdc.config.verification import Verification, VerificationOrOff
from cdc.config.views import View
from cdc.errors import ServiceUnprotected
from cdc.table import matches


class TableRule(Model):
    """A rule that selects tables to capture."""

    match: Glob
    """Glob over `schema.table` of the tables to capture."""
    exclude: tuple[Glob, ...] = ()
    """Globs over `schema.table` of tables that are not captured, even if another rule matches them."""


class Commit(Model):
    """When the reader commits changes to the log: as soon as one of the two limits is reached."""

    bytes: Annotated[Bytes, Field(gt=0)] = 16 * 2**20
    """Bytes of uncommitted changes at which the reader commits at once; default 16 MiB."""
    linger: Seconds = 0.05
    """Time after a commit at which the reader commits again, even if fewer than `bytes` are uncommitted; default 60
    ms."""


class Segment(Model):
    """When the log closes a segment, the unit of retention, and begins the next one: as soon as a limit is reached."""

    bytes: Annotated[Bytes, Field(gt=0)] = 256 * 2**20
    """Size at which the log closes a segment; default 256 MiB."""
    every: Annotated[Seconds, Field(gt=0)] = 3600.0
    """Age at which the log closes a segment; default 1 hour."""


class Compact(Model):
    """When closed segments are compacted to the latest state of every row; compaction bounds the size of the log."""

    every: SecondsOrOff = 3600.0
    """Interval at which the apply process compacts closed segments; default 1 hour. `off` or 0 turns compaction off,
    and then no segment is ever removed."""


class Retain(Model):
    """How long single changes stay readable after compaction: until every consumer has read them, at most `max`."""

    max: Annotated[Seconds, Field(gt=0)] = 7 * 86400.0
    """Age at which a compacted segment is removed even if a consumer has not read it; default 7 days. A sink that is
    behind by more than this age may need a replay."""
    grace: Seconds = 3600.0
    """Time for which removed files stay on disk for processes that still read them; default 1 hour."""


LOG_OF_VIEWS: Final = "derived"
"""Name of the directory of the log of views, in that of the change log."""


class Log(Model):
    """The change log."""

    path: Location
    """Directory of the log, local or in an object store."""
    storage: Storage = Storage()
    """Access to the object store if `path` is in one."""
    commit: Commit = Commit()
    segment: Segment = Segment()
    compact: Compact = Compact()
    retain: Retain = Retain()

    @property
    def root(self) -> Root:
        """Location of the log with the options of its object store."""
        return log_root(self.path, self.storage)

    @property
    def of_views(self) -> Root:
        """Location of the log of views, which has the changes of the views of the pipeline."""
        return log_root(f"{self.path}/{LOG_OF_VIEWS}", self.storage)


class EngineChoice(StrEnum):
    """Which engine reads, folds and writes the changes that wait for a sink."""

    #: The apply process takes small ranges. Spark takes what does not fit its memory, and on a cluster large backlogs.
    AUTO = "auto"
    #: Spark, for every batch; its streaming queries always run.
    SPARK = "spark"
    #: The apply process. A sink stops before a transaction that does not fit the memory of this process.
    HERE = "here"


class Spark(Model):
    """The Spark session that applies the log to the sinks."""

    master: Annotated[str, Field(min_length=1)] = "local[2]"
    """Spark master URL."""
    engine: EngineChoice = EngineChoice.AUTO
    """What applies changes to the sinks: `auto`, `spark` for every batch, or `here` (never Spark).

    With `auto` the apply process takes small ranges. Spark takes single transactions and compacted states that do not
    fit its memory and, if the master is a cluster, backlogs above 1,000,000 rows or 256 MiB of log files. With `here` a
    sink stops with CDC-3043 before such a transaction. Writers, expressions, views, compactions and replays use Spark
    as they need it.
    """
    trigger: Seconds = 0.2
    """Batch interval: minimum time between the starts of two batches of a sink; 0 starts a batch as soon as possible.

    A longer interval needs less CPU, and changes reach the targets later. If a batch of several tables takes longer
    than a sixth of the interval, the next one begins up to half an interval later.
    """
    checkpoint: Location = ""
    """Local directory for the checkpoints of streaming queries; default `checkpoint` next to the log."""
    conf: Annotated[Mapping[str, str], Field(repr=False)] = {}
    """Additional Spark configuration properties; values are text."""
    delta_jars: tuple[Location, ...] = ()
    """Paths of Delta's jars, for machines that cannot download them."""


def _catalog_url(url: str, info: ValidationInfo) -> str:
    """Return the URL with an absolute path for SQLite, and with the psycopg driver for Postgres."""
    scheme, _, rest = url.partition("://")
    if scheme == "postgresql":
        return f"postgresql+psycopg://{rest}"
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return "sqlite:///" + absolute_path(rest[1:], info)
    return url


class CatalogLocation(Model):
    """The catalog database, which stores definitions, commands and status."""

    url: Annotated[
        str,
        Field(pattern=r"^(sqlite|postgresql(\+psycopg)?)://", repr=False),
        AfterValidator(_catalog_url),
    ] = ""
    """SQLAlchemy URL; default an SQLite file `catalog.db` next to the log."""


SHORTEST_TOKEN: Final = 16
"""Minimum number of characters of a token: half a UUID, more than an attacker can guess over a network."""


def _token(secret: Secret) -> Secret:
    if secret.reference == HIDDEN:
        raise invalid("the token is in plain text in the definition: write ${VAR}, {env: VAR} or {file: PATH}")
    if not _is_token(secret.reveal()):
        raise invalid("expected at least 16 ASCII characters without spaces, for example from 'openssl rand -hex 32'")
    return secret


def _is_token(text: str) -> bool:
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable() and " " not in text


class Service(Model):
    """The HTTP server for API, metrics and page."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. An address that other machines can reach requires `token`."""
    port: Annotated[Whole, Field(ge=0, le=65535)] = 8083
    """Port to listen on; 0 selects a free port."""
    token: Annotated[Secret, AfterValidator(_token)] | None = None
    """Token that API and page require as `Authorization: Bearer`; default none. A secret file is read again for every
    request."""

    def current_token(self) -> str | None:
        """Return the present token; None if no token is set, or if the secret file has no valid token.

        While the secret file has no valid token, the server rejects every request that needs the token.
        """
        found = self.token.reread() if self.token is not None else None
        return found if found is not None and _is_token(found) else None

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the service."""
        return is_loopback(self.host)

    @property
    def exposure(self) -> ServiceUnprotected | None:
        """Error if the address is public and no token is set; the server then does not start. Otherwise None."""
        if self.is_local or self.token is not None:
            return None
        return ServiceUnprotected(f"service.token is missing: other machines can reach {self.host!r}")


def is_loopback(host: str) -> bool:
    """Return True if the host name or address is a loopback address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _catalog_next_to(log: str) -> str:
    """Return the URL of an SQLite catalog next to a local log; an empty text if the log is in an object store."""
    return "" if is_remote(log) else "sqlite:///" + sibling_path(log.removeprefix("file://"), "catalog.db")


class Definition(Model):
    """One pipeline: a source database, its change log and its sinks."""

    version: Literal[1] = 1
    """Version of the definition format."""
    name: Name
    """Name of the pipeline; the default names of slot and publication contain it."""
    source: Source
    tables: Annotated[tuple[TableRule, ...], Field(min_length=1)]
    """Rules that select the tables to capture."""
    exclude: tuple[Glob, ...] = ()
    """Globs over `schema.table` of tables that are not captured, even if a rule matches them."""
    snapshot: Snapshot = Snapshot()
    log: Log
    sinks: tuple[DefinedSink, ...] = ()
    """Sinks to which the log is applied: Delta tables and search indexes."""
    views: tuple[View, ...] = ()
    """Streams that SQL derives from the captured tables; sinks and deliveries receive them like tables."""
    documents: tuple[Document, ...] = ()
    """Views without SQL: rows of a table with rows of other tables inside of them. Each becomes a view."""
    deliveries: tuple[Delivery, ...] = ()
    """Deliveries of the log's changes as events, to brokers, files and sockets."""
    verify: VerificationOrOff = Verification()
    """Continuous verification of the sinks by the server process; `off` turns it off."""
    spark: Spark = Spark()
    catalog: CatalogLocation = CatalogLocation()
    service: Service = Service()

    @property
    def patterns(self) -> list[str]:
        """Globs of the captured tables."""
        return [rule.match for rule in self.tables]

    @property
    def excludes(self) -> list[str]:
        """Globs of the tables that are not captured, from `exclude` of the definition and of each table rule."""
        return [*self.exclude, *(glob for rule in self.tables for glob in rule.exclude)]

    def captures(self, topic: str) -> bool:
        """Return True if a table rule matches the topic and nothing excludes it."""
        return matches(topic, self.patterns) and not matches(topic, self.excludes)

    @property
    def sinks_of_tables(self) -> tuple[DefinedSink, ...]:
        """The sinks that receive captured tables, not views."""
        return tuple(sink for sink in self.sinks if not sink.views)

    @property
    def sink_of_view_inputs(self) -> DeltaSinkDefinition | None:
        """The Delta sink whose targets the views read; None if there is none."""
        wanted = next((view.over for view in self.views if view.over), None)
        tables = queried_sinks(self.sinks_of_tables)
        return next((sink for sink in tables if wanted in {None, sink.name}), None)

    def log_of(self, consumer: DefinedSink | Delivery) -> Root:
        """Return the location of the log that a sink or delivery reads: the change log, or that of views."""
        return self.log.of_views if consumer.views else self.log.root

    def with_rules_of(self, other: Self) -> Self:
        """Return a copy of this definition with the table rules of another definition."""
        return self.model_copy(update={"tables": other.tables, "exclude": other.exclude})

    @model_validator(mode="after")
    def _views_of_sinks_apart(self) -> Self:
        """Return the definition with two sinks in place of each one that receives tables and views."""
        if not any(has_tables_and_views(sink) for sink in self.sinks):
            return self
        return self.model_copy(update={"sinks": with_views_apart(self.sinks)})

    @model_validator(mode="after")
    def _documents_as_views(self) -> Self:
        """Return the definition with a view in place of each document; they follow the other views."""
        if not self.documents:
            return self
        return self.model_copy(update={"views": (*self.views, *(one.view for one in self.documents)), "documents": ()})

    @model_validator(mode="after")
    def _named_after_the_pipeline(self) -> Self:
        """Return the definition with defaults for slot name, publication name, Spark checkpoint and catalog URL."""
        source = self.source
        slot = source.slot.model_copy(update={"name": source.slot.name or f"cdc_{self.name}"})
        publication = source.publication.model_copy(update={"name": source.publication.name or f"cdc_{self.name}_pub"})
        checkpoint = self.spark.checkpoint or (
            "" if is_remote(self.log.path) else sibling_path(self.log.path, "checkpoint")
        )
        return self.model_copy(
            update={
                "source": source.model_copy(update={"slot": slot, "publication": publication}),
                "spark": self.spark.model_copy(update={"checkpoint": checkpoint}),
                "catalog": CatalogLocation.model_construct(url=self.catalog.url or _catalog_next_to(self.log.path)),
            }
        )
