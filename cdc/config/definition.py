"""Definition: one pipeline as it is asked for: source, tables, log, sinks.

Every model is frozen and refuses unknown keys. The docstring under a field is its description in the
JSON schema and in an editor. Durations are seconds and sizes bytes once read.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from ipaddress import ip_address
from typing import Annotated, Any, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from cdc.config import dsn
from cdc.config.model import Model
from cdc.config.names import (
    Glob,
    Identifier,
    Location,
    Name,
    SlotName,
    Switch,
    Whole,
    absolute_path,
    invalid,
    is_remote,
    sibling_path,
)
from cdc.config.secret import HIDDEN, Secret
from cdc.config.sinks import Sink
from cdc.config.storage import Storage, log_root
from cdc.config.units import Bytes, Seconds
from cdc.errors import ServiceUnprotected
from cdc.log.object_path import Root
from cdc.table import split_topic, topic


class Undecodable(StrEnum):
    """What becomes of text in an SQL_ASCII database that is not UTF-8; other encodings are converted by the server."""

    #: Stop, and name table, column and place.
    FAIL = "fail"
    #: `base64:` and the base64 of its bytes; so are values that begin with `base64:` themselves.
    BASE64 = "base64"
    #: U+FFFD for every byte sequence that cannot be read; what stood there is lost.
    REPLACE = "replace"


def _source_dsn(secret: Secret) -> Secret:
    dsn.check_dsn(secret.reveal())
    if secret.reference == HIDDEN and dsn.contains_password(secret.reveal()):
        raise invalid("a password stands in the file: write ${VAR}, {env: VAR} or {file: PATH}")
    return secret


class Slot(Model):
    """The replication slot."""

    name: SlotName = ""
    """Its name on the server; default `cdc_<name of the pipeline>`."""
    create: Switch = True
    """Whether the reader may create it, and replace it for a copy; if not, `cdc slots adopt` assigns it one."""
    failover: Switch = False
    """Whether standbys follow it, so that it outlives a failover; needs Postgres 17 and `sync_replication_slots`."""


class Manage(StrEnum):
    """Which publication the reader may alter: add tables to it, or take them out."""

    #: Only one that it created itself.
    AUTO = "auto"
    #: Also one that somebody else created: its other subscribers see the change.
    ALWAYS = "always"
    #: None: status and `cdc doctor` give the SQL.
    NEVER = "never"


class Publication(Model):
    """The publication that says which tables the server sends."""

    name: Identifier = ""
    """Its name on the server; default `cdc_<name of the pipeline>_pub`."""
    create: Switch = True
    """Whether the reader may create it."""
    manage: Manage = Manage.AUTO
    """Whether the reader may alter it: `auto` (one that it created), `always`, `never`."""

    @property
    def alter(self) -> bool | None:
        """Whether it may be altered, whatever created it; None: only if this pipeline did."""
        return None if self.manage is Manage.AUTO else self.manage is Manage.ALWAYS


class OnWalBudget(StrEnum):
    """What to do when the server keeps more WAL for the slot than the budget."""

    #: Say so, and go on.
    WARN = "warn"
    #: Say so, and stop the reader; the slot stays.
    STOP = "stop"


class Source(Model):
    """The watched database."""

    dsn: Annotated[Secret, AfterValidator(_source_dsn)]
    """How to connect, as a URL or as `host=… dbname=…`; a password comes by reference."""
    slot: Slot = Slot()
    publication: Publication = Publication()
    heartbeat: Seconds = 10.0
    """How often an idle source is written to, so that its WAL can go; 0 turns it off."""
    undecodable: Undecodable = Undecodable.FAIL
    """What becomes of text that is not UTF-8, which only a database of encoding SQL_ASCII can hold."""
    primary: Annotated[Secret, AfterValidator(_source_dsn)] | None = None
    """Where `dsn` is a standby: how to connect to its primary, to which heartbeats go; default none."""
    wal_budget: Annotated[Bytes, Field(gt=0)] | None = None
    """How much WAL the server may keep for the slot; warned at 80 %; default no limit."""
    on_wal_budget: OnWalBudget = OnWalBudget.WARN
    """What to do above the budget; the slot is never dropped."""

    def current_dsn(self) -> str:
        """The DSN for a connection that is made now: as its file holds it, the known one while that is malformed."""
        return _current(self.dsn)

    def current_primary(self) -> str:
        """The same of where can be written: the primary, which is `dsn` itself where that is no standby."""
        return _current(self.primary or self.dsn)


def _current(secret: Secret) -> str:
    found = secret.current()
    try:
        dsn.check_dsn(found)
    except PydanticCustomError:
        return secret.reveal()
    return found


class TableRule(Model):
    """Tables to capture."""

    match: Glob
    """A glob over `schema.table`."""
    exclude: tuple[Glob, ...] = ()
    """Globs that take tables away again."""


class SnapshotMode(StrEnum):
    """What is copied of the rows that exist before the stream."""

    #: Everything, once, beside the stream.
    INITIAL = "initial"
    #: As initial, and again when the source can no longer continue the log: a new epoch begins by itself.
    WHEN_NEEDED = "when_needed"
    #: Nothing: the log begins with the first change.
    NO_DATA = "no_data"
    #: Everything, and the reader ends when all of it is in the log.
    INITIAL_ONLY = "initial_only"


class StandbyLimit(Model):
    """A standby that copying must not leave behind."""

    name: Annotated[str, Field(min_length=1)]
    """Its `application_name` in `pg_stat_replication`."""
    lag: Annotated[Bytes, Field(gt=0)] = 64 * 2**20
    """Copying rests while the standby has replayed less than the WAL's end by more than this."""


class SourceLoad(Model):
    """How much copying may ask of the source."""

    bytes_per_second: Annotated[Bytes, Field(gt=0)] | None = None
    """Of rows as text; default no limit."""
    standby: StandbyLimit | None = None
    """Default none."""


def _table_name(text: str) -> str:
    schema, name = split_topic(text)
    if not schema:
        raise invalid("expected schema.table, for example public.debezium_signal")
    return topic(schema, name)


class Snapshot(Model):
    """How rows that exist already are copied."""

    mode: SnapshotMode = SnapshotMode.INITIAL
    """What is copied."""
    parallel: Annotated[Whole, Field(ge=1, le=16)] = 2
    """Connections that read at the same time."""
    chunk_rows: Annotated[Whole, Field(ge=1, le=1_000_000)] = 50_000
    """Rows of a chunk at most, about; one ends at a few MiB as well."""
    beside: Annotated[Bytes, Field(ge=0)] = 8 * 2**20
    """Tables larger than this are copied in chunks while the stream runs; others at once, before it begins."""
    max_source_load: SourceLoad = SourceLoad()
    signals: Annotated[str, AfterValidator(_table_name)] | None = None
    """A captured table of which each new row is a signal, with Debezium's columns id, type, data; default none."""


class Commit(Model):
    """When the log commits: at the first of the two."""

    bytes: Annotated[Bytes, Field(gt=0)] = 16 * 2**20
    """Bytes received since the last commit."""
    linger: Seconds = 0.1
    """Time since the first change that waits."""


class Segment(Model):
    """When the log begins a new segment, the unit that retention drops: at the first of the two."""

    bytes: Annotated[Bytes, Field(gt=0)] = 256 * 2**20
    """Bytes in the segment."""
    every: Annotated[Seconds, Field(gt=0)] = 3600.0
    """Age of the segment."""


def _off(value: Any) -> Any:
    return 0 if value == "off" else value


SecondsOrOff = Annotated[
    Seconds,
    BeforeValidator(_off),
    WithJsonSchema({"type": ["string", "integer"], "pattern": r"^(off|0|\d+(\.\d+)? ?(ms|s|m|h|d))$", "maximum": 0}),
]


class Compact(Model):
    """When segments that are closed are compacted: of every row its latest state is kept, so the log stays bounded."""

    every: SecondsOrOff = 3600.0
    """How often the apply process looks for some; `off` or 0: never, and then no segment ever goes."""


class Retain(Model):
    """How long compacted changes stay readable one by one: until every consumer has read them, at most max."""

    max: Annotated[Seconds, Field(gt=0)] = 7 * 86400.0
    """Age at which a segment goes although a consumer has not read it; a sink that is so late may need a replay."""
    grace: Seconds = 3600.0
    """How long files that left the log stay on the disk, for processes that are reading them."""


class Log(Model):
    """The change log."""

    path: Location
    """Its directory, local or in an object store."""
    storage: Storage = Storage()
    """Where `path` is in an object store: how it is reached."""
    commit: Commit = Commit()
    segment: Segment = Segment()
    compact: Compact = Compact()
    retain: Retain = Retain()

    @property
    def root(self) -> Root:
        """Where it lies, with all that is needed to read and write there."""
        return log_root(self.path, self.storage)


class Spark(Model):
    """The session that applies the log."""

    master: Annotated[str, Field(min_length=1)] = "local[2]"
    """Where it runs, in Spark's words."""
    trigger: Seconds = 0.0
    """Time between batches; 0 starts the next one as soon as there is something."""
    checkpoint: Location = ""
    """Directory of this machine where streaming queries keep their place; default beside the log."""
    conf: Annotated[Mapping[str, str], Field(repr=False)] = {}
    """More settings of Spark, by its own names; values are text."""
    delta_jars: tuple[Location, ...] = ()
    """Jars of Delta for machines that cannot download them."""


def _catalog_url(url: str, info: ValidationInfo) -> str:
    """An SQLite file's path made absolute; Postgres by the one driver there is."""
    scheme, _, rest = url.partition("://")
    if scheme == "postgresql":
        return f"postgresql+psycopg://{rest}"
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return "sqlite:///" + absolute_path(rest[1:], info)
    return url


class CatalogLocation(Model):
    """The database of definitions, commands and visible state."""

    url: Annotated[
        str,
        Field(pattern=r"^(sqlite|postgresql(\+psycopg)?)://", repr=False),
        AfterValidator(_catalog_url),
    ] = ""
    """An SQLAlchemy URL; default an SQLite file beside the log."""


SHORTEST_TOKEN: Final = 16
"""Characters; half a UUID, more than can be guessed over a network."""


def _token(secret: Secret) -> Secret:
    if secret.reference == HIDDEN:
        raise invalid("a token stands in the file: write ${VAR}, {env: VAR} or {file: PATH}")
    if not _is_token(secret.reveal()):
        raise invalid("expected at least 16 characters of ASCII without spaces, for example of 'openssl rand -hex 32'")
    return secret


def _is_token(text: str) -> bool:
    return len(text) >= SHORTEST_TOKEN and text.isascii() and text.isprintable() and " " not in text


class Service(Model):
    """API and page."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on; one that other machines reach needs a token."""
    port: Annotated[Whole, Field(ge=0, le=65535)] = 8083
    """Port to listen on; 0 takes a free one."""
    token: Annotated[Secret, AfterValidator(_token)] | None = None
    """What API and page ask for as `Authorization: Bearer`; a file is read for every request."""

    def current_token(self) -> str | None:
        """The token as its file contains it now; None while the file is gone or contains none: then nothing opens."""
        found = self.token.reread() if self.token is not None else None
        return found if found is not None and _is_token(found) else None

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the service."""
        return is_loopback(self.host)

    @property
    def exposure(self) -> ServiceUnprotected | None:
        """Why a server of this definition does not start: other machines would reach it without a token."""
        if self.is_local or self.token is not None:
            return None
        return ServiceUnprotected(f"expected service.token: other machines reach {self.host!r}")


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def _beside_the_log(log: str) -> str:
    """The catalog's default; empty where the log is not on this machine, for SQLite cannot follow it there."""
    return "" if is_remote(log) else "sqlite:///" + sibling_path(log.removeprefix("file://"), "catalog.db")


class Definition(Model):
    """One pipeline: a source database, its log, and what is derived from it."""

    version: Literal[1] = 1
    """Version of this format."""
    name: Name
    """Of the pipeline; slot and publication are named after it."""
    source: Source
    tables: Annotated[tuple[TableRule, ...], Field(min_length=1)]
    """What is captured."""
    exclude: tuple[Glob, ...] = ()
    """Globs over `schema.table` that are captured by no rule."""
    snapshot: Snapshot = Snapshot()
    log: Log
    sinks: tuple[Sink, ...] = ()
    """The derived stores."""
    spark: Spark = Spark()
    catalog: CatalogLocation = CatalogLocation()
    service: Service = Service()

    @property
    def patterns(self) -> list[str]:
        """Globs of the captured tables."""
        return [rule.match for rule in self.tables]

    @property
    def excludes(self) -> list[str]:
        """Globs of what is not captured, those of the rules included."""
        return [*self.exclude, *(glob for rule in self.tables for glob in rule.exclude)]

    def with_rules_of(self, other: Self) -> Self:
        """This definition with another's rules for tables."""
        return self.model_copy(update={"tables": other.tables, "exclude": other.exclude})

    @model_validator(mode="after")
    def _named_after_the_pipeline(self) -> Self:
        """Fill in the defaults that depend on other keys."""
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
                "catalog": CatalogLocation.model_construct(url=self.catalog.url or _beside_the_log(self.log.path)),
            }
        )
