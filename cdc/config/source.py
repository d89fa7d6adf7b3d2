"""Models for the captured database and for the copy of its existing rows, and the syntax check of a DSN.

The check does not use libpq, because libpq's error messages repeat parts of the password.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Final, Self
from urllib.parse import parse_qsl, unquote

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from cdc.config.field_types import Identifier, Model, SlotName, Switch, Whole, invalid
from cdc.config.secret import HIDDEN, ReferencedSecret, Secret
from cdc.config.units import Bytes, Seconds
from cdc.table import split_topic, topic

SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
_URL: Final = re.compile(
    r"postgres(?:ql)?://(?:(?P<user>[^@/?#]*)@)?(?P<host>[^/?#@]*)(?:/(?P<db>[^?#]*))?(?:\?(?P<query>[^#]*))?\Z"
)
_PAIR: Final = re.compile(r"\s*([a-z_]+)\s*=\s*('(?:[^'\\]|\\.)*'|[^\s'\\]*(?:\\.[^\s'\\]*)*)", re.DOTALL)
_BAD_ESCAPE: Final = re.compile(r"%(?![0-9A-Fa-f]{2})")


class Undecodable(StrEnum):
    """Policy for text that is not UTF-8, which only an SQL_ASCII database can contain."""

    #: Stop with an error that names table, column and offset.
    FAIL = "fail"
    #: Write `base64:` and the base64 of the bytes, also for values that begin with `base64:` themselves.
    BASE64 = "base64"
    #: Write U+FFFD for every invalid byte sequence; the original bytes are lost.
    REPLACE = "replace"


def _source_dsn(secret: Secret) -> Secret:
    check_dsn(secret.reveal())
    if secret.reference == HIDDEN and contains_password(secret.reveal()):
        raise invalid("the password is in plain text in the definition: write ${VAR}, {env: VAR} or {file: PATH}")
    return secret


class Slot(Model):
    """The replication slot."""

    name: SlotName = ""
    """Name of the slot on the server; default `cdc_<name of the pipeline>`."""
    create: Switch = True
    """Whether the reader may create the slot, and replace it when a new epoch begins. If false, assign an existing slot
    with `cdc slots adopt`."""
    failover: Switch = False
    """Whether standbys synchronize the slot, so that it survives a failover. Requires Postgres 17 or later and
    `sync_replication_slots` on the standby."""


class Manage(StrEnum):
    """Which publications the reader may alter, to add tables to them and to drop tables from them."""

    #: Only a publication that this pipeline created.
    AUTO = "auto"
    #: Any publication, also one that somebody else created; its other subscribers see the change.
    ALWAYS = "always"
    #: No publication; `cdc status` and `cdc doctor` print the SQL to run.
    NEVER = "never"


class Publication(Model):
    """The publication, which selects the tables that the server sends."""

    name: Identifier = ""
    """Name of the publication on the server; default `cdc_<name of the pipeline>_pub`."""
    create: Switch = True
    """Whether the reader may create the publication."""
    manage: Manage = Manage.AUTO
    """Whether the reader may alter the publication: `auto` (only if this pipeline created it), `always` or `never`."""

    @property
    def alter(self) -> bool | None:
        """True if the reader may alter any publication, False if it may alter none.

        None if it may alter only a publication that this pipeline created.
        """
        return None if self.manage is Manage.AUTO else self.manage is Manage.ALWAYS


class OnWalBudget(StrEnum):
    """What the reader does when the server keeps more WAL for the slot than `wal_budget`."""

    #: Log a warning and continue.
    WARN = "warn"
    #: Stop the reader; the slot stays.
    STOP = "stop"


class OnFailover(StrEnum):
    """What the reader does if a promoted server does not have the last transactions of the log."""

    #: Mark the tables of these transactions `needs_resync`, and continue.
    CONTINUE = "continue"
    #: Read the rows of these transactions again, or their tables, while the stream continues.
    RESYNC = "resync"
    #: Stop the reader; the log stays as it is.
    STOP = "stop"


class Source(Model):
    """The captured Postgres database."""

    dsn: Annotated[Secret, AfterValidator(_source_dsn)]
    """Connection string, as a URL or as `host=… dbname=…`. Write the password as a reference, for example `${VAR}`."""
    slot: Slot = Slot()
    publication: Publication = Publication()
    heartbeat: Seconds = 10.0
    """Interval of the heartbeat messages that let an idle source remove WAL; default 10 seconds; 0 turns them off."""
    undecodable: Undecodable = Undecodable.FAIL
    """Policy for text that is not UTF-8, which only an SQL_ASCII database can contain: `fail`, `base64` or
    `replace`."""
    primary: Annotated[Secret, AfterValidator(_source_dsn)] | None = None
    """Connection string of the primary if `dsn` is a standby; heartbeats are written there. Default none."""
    wal_budget: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of WAL that the server may keep for the slot; a warning appears at 80 %. Default no limit."""
    on_wal_budget: OnWalBudget = OnWalBudget.WARN
    """What the reader does above `wal_budget`: `warn` or `stop`. The reader never drops the slot."""

    on_failover: OnFailover = OnFailover.RESYNC
    """What the reader does if a promoted standby does not have the last transactions of the log: `resync` reads their
    rows or tables again, `continue` only marks these tables, `stop` ends the reader. If nothing is lost, it always
    continues."""

    def moved_to(self, dsn: str) -> Self:
        """Return these settings for another server."""
        return self.model_copy(update={"dsn": Secret(dsn), "primary": None})

    def current_dsn(self) -> str:
        """Return the DSN for a new connection, read again from its secret file.

        If the file contains no well-formed DSN, the DSN that was loaded with the definition is returned.
        """
        return _current_dsn(self.dsn)

    def current_primary(self) -> str:
        """Return the DSN of the server that accepts writes: `primary`, or `dsn` if there is no `primary`.

        The DSN is read again from its secret file. If the file contains no well-formed DSN, the DSN that was loaded
        with the definition is returned.
        """
        return _current_dsn(self.primary or self.dsn)


def _current_dsn(secret: Secret) -> str:
    found = secret.current()
    try:
        check_dsn(found)
    except PydanticCustomError:
        return secret.reveal()
    return found


class SnapshotMode(StrEnum):
    """Which of the rows that existed before the stream began are copied."""

    #: All rows, once, while changes stream.
    INITIAL = "initial"
    #: As `initial`; all rows again, in a new epoch, when the source can no longer continue the log.
    WHEN_NEEDED = "when_needed"
    #: No rows: the log begins with the first change.
    NO_DATA = "no_data"
    #: All rows; the reader exits when they are in the log.
    INITIAL_ONLY = "initial_only"


class StandbyLimit(Model):
    """A standby whose replay lag limits copying."""

    name: Annotated[str, Field(min_length=1)]
    """The standby's `application_name` in `pg_stat_replication`."""
    lag: Annotated[Bytes, Field(gt=0)] = 64 * 2**20
    """Bytes of WAL by which the standby's replay may lag; copying pauses above it. Default 64 MiB."""


class SourceLoad(Model):
    """Limits on the load that copying puts on the source."""

    bytes_per_second: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of row text that copying reads per second; default no limit."""
    standby: StandbyLimit | None = None
    """Standby whose replay lag pauses copying; default none."""


def _table_name(text: str) -> str:
    schema, name = split_topic(text)
    if not schema:
        raise invalid("expected schema.table, for example public.debezium_signal")
    return topic(schema, name)


class Snapshot(Model):
    """How existing rows are copied."""

    mode: SnapshotMode = SnapshotMode.INITIAL
    """Which existing rows are copied. `initial`: all. `when_needed`: all, and again in a new epoch when the source
    cannot continue the log, for example after a lost slot. `no_data`: none. `initial_only`: all; then the reader
    ends."""
    parallel: Annotated[Whole, Field(ge=1, le=16)] = 2
    """Number of connections that read chunks at the same time."""
    chunk_rows: Annotated[Whole, Field(ge=1, le=1_000_000)] = 50_000
    """Approximate maximum number of rows in a chunk; a chunk also ends at a few MiB."""
    beside: Annotated[Bytes, Field(ge=0)] = 8 * 2**20
    """Size in bytes above which a table is copied in chunks while changes stream. Smaller tables are copied whole
    before the stream begins. Default 8 MiB."""
    max_source_load: SourceLoad = SourceLoad()
    signals: Annotated[str, AfterValidator(_table_name)] | None = None
    """Captured table whose inserted rows are signals, with the columns id, type and data of Debezium's signaling table;
    default none."""
    signal_secret: ReferencedSecret | None = None
    """Secret, as a reference such as `${VAR}`, that a logical message with the prefix `cdc.signal` must contain in its
    field `secret` to be a signal; without quotes and backslashes. Default none, so no message is a signal, because any
    role can write such messages."""


def check_dsn(dsn: str) -> None:
    """Raise a validation error if libpq would reject the DSN; the error repeats no part of the DSN."""
    options = _url_options(dsn) if dsn.startswith(("postgres://", "postgresql://")) else _pairs(dsn)
    if options.get("sslmode", "prefer") not in SSL_MODES:
        raise invalid("unknown sslmode: expected one of {modes}", modes=", ".join(SSL_MODES))


def contains_password(dsn: str) -> bool:
    """Return True if a well-formed DSN contains a password."""
    if not dsn.startswith(("postgres://", "postgresql://")):
        return bool(_pairs(dsn).get("password"))
    match = _URL.match(dsn)
    return match is not None and (":" in (match["user"] or "") or bool(_url_options(dsn).get("password")))


def _url_options(dsn: str) -> dict[str, str]:
    if re.search(r"\s", dsn):
        raise invalid("the DSN contains white space: write it as %20")
    if _BAD_ESCAPE.search(dsn):
        raise invalid("the DSN contains a '%' without two hexadecimal digits after it: write it as %25")
    match = _URL.match(dsn)
    if match is None:
        raise invalid("malformed DSN: write @ / ? # in user or password as %40 %2F %3F %23")
    for port in re.findall(r":([^,:\]]*)(?:,|\Z)", re.sub(r"\[[^\]]*\]", "", match["host"])):
        if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):  # noqa: PLR2004 - of TCP
            raise invalid("invalid port in the DSN: expected a number from 1 to 65535")
    return {name: unquote(value) for name, value in parse_qsl(match["query"] or "", keep_blank_values=True)}


def _pairs(dsn: str) -> dict[str, str]:
    options, at = {}, 0
    while at < len(dsn.rstrip()):
        match = _PAIR.match(dsn, at)
        if match is None or not match[0]:
            raise invalid("malformed DSN: expected postgresql://user@host/database or host=… dbname=…")
        options[match[1]] = match[2].strip("'")
        at = match.end()
    if not options:
        raise invalid("malformed DSN: expected postgresql://user@host/database or host=… dbname=…")
    return options
