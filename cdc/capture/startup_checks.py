"""Startup checks: tests of definition, source, log, catalog and targets before a reader starts.

`cdc doctor` runs all checks and reports every problem. A reader runs the checks that apply to its start, in the same
order, and raises the first failure. So `cdc doctor` reports every error that would stop a reader at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from shlex import quote
from typing import Final, NamedTuple

from cdc import atomic_file, metrics
from cdc.bucket_files import BucketPath, has_conditional_create
from cdc.capture.resume_checks import captured_oids, check_source
from cdc.capture.slot_belongs_to_log import SlotClaim, check_adopted, check_replaceable, check_slot_name
from cdc.catalog import Catalog
from cdc.catalog.connection import check_catalog_writable, is_catalog_created
from cdc.config import Definition
from cdc.config.field_types import fixed_part, is_remote
from cdc.errors import (
    CatalogUnavailable,
    CdcError,
    ConfigError,
    HardLinksUnsupported,
    LogCorrupt,
    LogError,
    LogExposed,
    LogInaccessible,
    LogUnreachable,
    LogUnwritable,
    MaskedElsewhere,
    PreflightFailed,
    PublicationMissing,
    PublicationNarrowed,
    PublicationReplaced,
    SinkUnavailable,
    SlotInUse,
    SourceBehindLog,
    SourceError,
    SourceReplaced,
    TimelineChanged,
    all_error_classes,
    complete_remedy,
)
from cdc.file_modes import is_exposed
from cdc.log.epoch_and_slot_records import read_pending_epoch
from cdc.log.fenced_table import check_writable_format
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.decoding_settings import decoding_problems
from cdc.postgres.failover_settings import failover_problems
from cdc.postgres.preflight import PreflightProblem, SourceRequirements, preflight
from cdc.postgres.replication import identify_system
from cdc.postgres.slot import copy_lock, slot_status
from cdc.postgres.source_state import read_source_state
from cdc.postgres.tables import matched_schemas
from cdc.snapshot.publication_sync import publication_control
from cdc.table import TableSchema, matches
from cdc.targets.sink_kinds import reading_of
from cdc.targets.target_rule_changes import hidden_columns, masked_columns
from cdc.targets.unwritable_tables import tables_in


class CheckScope(Enum):
    """Kind of reader start that a failed check prevents."""

    #: Every start.
    ALWAYS = "always"
    #: Starts that take the initial snapshot.
    EMPTY = "empty log"
    #: Starts that continue a log.
    CONTINUED = "continued log"
    #: No start: the check concerns another process, or only warns.
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class CheckSubject:
    """Definition and log that the checks examine."""

    definition: Definition
    log: LogReader | None
    """Reader of the log; None if there is no log, or if it cannot be read."""
    unreadable: LogError | None
    """Error that prevents reading the log; None if the log can be read, or if there is no log yet."""

    @classmethod
    def of(cls, definition: Definition) -> CheckSubject:
        """Build the subject of a definition; open its log if there is one."""
        try:
            return cls(definition, LogReader(definition.log.root), None)
        except LogError as exc:
            return cls(definition, None, exc if type(exc) is not LogError else None)

    @property
    def is_continued(self) -> bool:
        """True if the log has a commit, so that a reader continues the log instead of copying the tables first."""
        return self.log is not None and self.log.last_commit is not None

    @property
    def begins_epoch(self) -> bool:
        """True if the next start of the reader begins a requested epoch; the source need not continue the old epoch."""
        intent = read_pending_epoch(self.definition.log.root)
        durable_position = None if self.log is None else self.log.durable
        return intent is not None and durable_position is not None and durable_position.epoch < intent.epoch

    @property
    def copies_first(self) -> bool:
        """True if the next start of the reader takes an initial snapshot, for which it needs a slot."""
        return self.unreadable is None and (not self.is_continued or self.begins_epoch)


class StartupCheck(NamedTuple):
    """One startup check; its function raises an error or yields problems, or does neither if the check passes."""

    find: Callable[[CheckSubject], Iterator[PreflightProblem]]
    binds: CheckScope
    """Kind of reader start that a failure of this check prevents."""
    subject: str
    """Name of the checked object for reports, such as `log`; some error classes are reported with their own object."""


def find_problems(definition: Definition) -> list[PreflightProblem]:
    """Return all problems of a definition, fatal problems first.

    To test the directories of log, catalog and targets, it writes a small file into each and removes the file.
    """
    problems = dict[tuple[str, str], PreflightProblem]()
    subject = CheckSubject.of(definition)
    for check in CHECKS:
        for problem in _run_check(check, subject):
            problems.setdefault((problem.code, problem.subject), problem)
    return sorted(problems.values(), key=lambda problem: not problem.fatal)


def check_log(definition: Definition) -> None:
    """Raise the first failure that prevents a reader from starting.

    If the log has no commit yet, the checks include the source; PreflightFailed lists all problems of the source.
    """
    subject = CheckSubject.of(definition)
    if subject.unreadable is not None and not isinstance(subject.unreadable, LogCorrupt):
        raise subject.unreadable
    bound = {CheckScope.ALWAYS, CheckScope.CONTINUED if subject.is_continued else CheckScope.EMPTY}
    if subject.unreadable is not None:
        bound = {CheckScope.ALWAYS}  # opening the log for writing repairs damage of a power loss
    for check in CHECKS:
        if check.binds in bound:
            fatal = _preventing_start(check.find(subject))
            if fatal:
                raise _error_of(fatal)


def check_source_ready(definition: Definition) -> None:
    """Raise PreflightFailed unless the source of the definition is ready for change capture."""
    fatal = _preventing_start(_source(CheckSubject(definition, None, None)))
    if fatal:
        raise _error_of(fatal)


def _preventing_start(problems: Iterator[PreflightProblem]) -> list[PreflightProblem]:
    """Return the fatal problems, without tables that the role may not read: the reader starts without these tables."""
    return [problem for problem in problems if problem.fatal and not problem.table_only]


def defined_tables(definition: Definition) -> list[TableSchema]:
    """Return the tables of the source that the definition matches.

    If the source cannot be read, returns the tables of the log; an empty list if there is no readable log.
    """
    try:
        return matched_schemas(definition.source.current_dsn(), definition.patterns, definition.excludes)
    except (SourceError, ConfigError):
        pass  # find_problems reports the error
    try:
        return tables_in(LogReader(definition.log.root))
    except LogError:
        return []


def rule_problems(definition: Definition, file: str) -> list[PreflightProblem]:
    """Return a problem for each target whose rows were written under other rules than the definition has.

    A problem is a warning if the apply process makes the target follow the rules.

    file: path of the definition, for the remedies.
    """
    problems = []
    for sink in definition.sinks:
        for finding in reading_of(sink).rule_findings(sink):
            fix = complete_remedy(finding.error.fix, sink=sink.name, topic=finding.topic, file=file)
            message = f"{finding.message}; {fix}"
            problems.append(PreflightProblem(finding.error.code, finding.subject, message, fatal=finding.stops))
    return problems


def mask_problems(definition: Definition, tables: Sequence[TableSchema]) -> list[PreflightProblem]:
    """Return a warning for each table of which one sink shows columns that another sink masks."""
    problems = []
    for schema in tables:
        feeding = [sink for sink in definition.sinks_of_tables if matches(schema.topic, sink.tables)]
        masked = {sink.name: masked_columns(sink, schema) for sink in feeding}
        for sink in feeding:
            for other, columns in masked.items():
                if clear := sorted(columns - hidden_columns(sink, schema)):
                    message = (
                        f"sink {sink.name!r} shows {', '.join(map(repr, clear))} unmasked, but sink "
                        f"{other!r} masks these columns"
                    )
                    fix = MaskedElsewhere.remedy
                    problems.append(
                        PreflightProblem(MaskedElsewhere.code, schema.topic, f"{message}; {fix}", fatal=False)
                    )
    return problems


def storage_problems(definition: Definition) -> list[PreflightProblem]:
    """Return the problems of the log's object store; an empty list if the log is in a local directory."""
    root = definition.log.root
    if not isinstance(root, BucketPath):
        return []
    try:
        message = (
            ""
            if has_conditional_create(root)
            else "the object store ignores If-None-Match, so two writers could overwrite each other's files"
        )
        code, fix = LogInaccessible.code, "set log.path to an object store that supports If-None-Match"
    except (LogInaccessible, LogUnreachable) as exc:
        message = exc.message
        code = exc.code
        fix = exc.fix
    return [PreflightProblem(code=code, subject=definition.log.path, message=f"{message}: {fix}")] if message else []


def _storage(subject: CheckSubject) -> Iterator[PreflightProblem]:
    yield from storage_problems(subject.definition)
    if subject.unreadable is not None:
        yield _problem_of(subject.unreadable, subject.definition.log.path)


def _log_directory(subject: CheckSubject) -> Iterator[PreflightProblem]:
    root = subject.definition.log.root
    if subject.log is not None:
        check_writable_format(subject.log.format)
    if isinstance(root, Path):
        try:
            atomic_file.probe_links(root)
        except OSError as exc:
            raise LogUnwritable(f"the log's directory {str(root)!r} cannot be written: {_reason(exc)}") from exc
    yield from ()


def _connection(subject: CheckSubject) -> Iterator[PreflightProblem]:
    with connect(subject.definition.source.current_dsn(), application_name="cdc preflight"):
        yield from ()


def _source(subject: CheckSubject) -> Iterator[PreflightProblem]:
    source = subject.definition.source
    wants = SourceRequirements(
        slot=source.slot.name,
        publication=source.publication.name,
        patterns=subject.definition.patterns,
        exclude=subject.definition.excludes,
        create_slot=source.slot.create,
        control=publication_control(subject.definition),
    )
    return iter(preflight(source.current_dsn(), wants))


def _decoding(subject: CheckSubject) -> Iterator[PreflightProblem]:
    """Yield the problems of the server's version and of its settings for logical decoding."""
    source = subject.definition.source
    return iter(decoding_problems(source.current_dsn(), source.slot.name))


def _existing_slot(subject: CheckSubject) -> Iterator[PreflightProblem]:
    """Raise an error if a new epoch must not replace the existing slot; yield a warning if the slot is in use."""
    if not subject.copies_first:
        return
    source, root = subject.definition.source, subject.definition.log.root
    seen = None if subject.is_continued else last_known_position(subject.definition)
    with connect(source.current_dsn(), application_name="cdc preflight") as conn:
        if not source.slot.create or slot_status(conn, source.slot.name) is None:
            return
        try:
            # a reader that takes its snapshot has a slot and an empty log: the lock excludes it
            with copy_lock(conn, source.slot.name):
                log = CheckSubject.of(subject.definition).log
                slot = slot_status(conn, source.slot.name)
                if slot is not None and (log is None or log.durable == (subject.log and subject.log.durable)):
                    check_replaceable(slot, SlotClaim.of(root, log), identify_system(source.current_dsn()), seen)
        except SlotInUse as exc:
            yield _problem_of(exc, f"slot {source.slot.name}", fatal=False)


def _adopted_slot(subject: CheckSubject) -> Iterator[PreflightProblem]:
    """Raise an error if an epoch begins, the reader may not create its slot, and no usable slot was adopted."""
    source = subject.definition.source
    if source.slot.create or not subject.copies_first:
        return
    with connect(source.current_dsn(), application_name="cdc preflight") as conn:
        slot = slot_status(conn, source.slot.name)
    claim = SlotClaim.of(subject.definition.log.root, subject.log)
    check_adopted(slot, source.slot.name, claim, identify_system(source.current_dsn()))
    yield from ()


def _continuity(subject: CheckSubject) -> Iterator[PreflightProblem]:
    """Raise an error if the source and its slot cannot continue the log."""
    log, definition = subject.log, subject.definition
    last = None if log is None else log.last_commit
    if log is None or last is None or subject.begins_epoch:
        return
    source, root = definition.source, definition.log.root
    tables = captured_oids(log.schemas())
    state = read_source_state(source.current_dsn(), source.slot.name, source.publication.name, tables)
    check_slot_name(SlotClaim.of(root, log), state.slot)
    check_source(log.identity, last, state, LogReader(root).durable)
    yield from ()


def _failover(subject: CheckSubject) -> Iterator[PreflightProblem]:
    """Yield a warning for each setting of the servers that could lose the slot, or transactions, in a promotion."""
    source = subject.definition.source
    if source.slot.failover:
        yield from failover_problems(source.current_dsn(), source.slot.name)


def _catalog(subject: CheckSubject) -> Iterator[PreflightProblem]:
    check_catalog_writable(subject.definition.catalog.url)
    yield from ()


def _lake(subject: CheckSubject) -> Iterator[PreflightProblem]:
    for sink in subject.definition.sinks:
        path = fixed_part(sink.directory)
        if not path or is_remote(path):
            continue
        try:
            atomic_file.probe_links(Path(path.removeprefix("file://")))
        except HardLinksUnsupported as exc:
            yield _problem_of(exc, f"sink {sink.name}")
        except OSError as exc:
            error = SinkUnavailable(f"the directory {path!r} of the targets cannot be written: {_reason(exc)}")
            yield _problem_of(error, f"sink {sink.name}")


def exposure_problems(definition: Definition) -> list[PreflightProblem]:
    """Return a warning if other accounts of this machine can read files of the log or the catalog.

    cdc creates private files; older versions did not.
    """
    catalog = definition.catalog.url.partition("sqlite:///")[2]
    folders = [(definition.log.root, "log"), *([(Path(catalog), "catalog")] if catalog else [])]
    return [
        PreflightProblem(
            code=LogExposed.code,
            subject=subject,
            message=f"other accounts of this machine can read {str(path)!r}: run chmod -R go= {quote(str(path))}",
            fatal=False,
        )
        for path, subject in folders
        if isinstance(path, Path) and is_exposed(path)
    ]


def _exposure(subject: CheckSubject) -> Iterator[PreflightProblem]:
    yield from exposure_problems(subject.definition)


CHECKS: Final = (
    StartupCheck(_storage, CheckScope.EMPTY, "log"),
    StartupCheck(_log_directory, CheckScope.ALWAYS, "log"),
    StartupCheck(_connection, CheckScope.EMPTY, "dsn"),
    StartupCheck(_source, CheckScope.EMPTY, "dsn"),
    StartupCheck(_decoding, CheckScope.EMPTY, "dsn"),
    StartupCheck(_existing_slot, CheckScope.ALWAYS, "slot"),
    StartupCheck(_adopted_slot, CheckScope.ALWAYS, "slot"),
    StartupCheck(_continuity, CheckScope.CONTINUED, "slot"),
    StartupCheck(_failover, CheckScope.NEVER, "slot"),
    StartupCheck(_exposure, CheckScope.NEVER, "log"),
    StartupCheck(_catalog, CheckScope.NEVER, "catalog"),
    StartupCheck(_lake, CheckScope.NEVER, "sinks"),
)
"""All checks, in the order in which an operator would fix their problems."""


def last_known_position(definition: Definition) -> Position | None:
    """Return the highest position of this pipeline's log that the catalog has recorded.

    Returns None if the catalog contains no position or does not answer.
    """
    positions, name = [0], definition.name
    with suppress(CatalogUnavailable):
        if not is_catalog_created(definition.catalog.url):
            return None
        with Catalog.open(definition.catalog.url, migrate=False) as catalog:
            positions += [int(sink.position) for sink in catalog.sinks.ls(name)]
            positions += [int(table.position) for table in catalog.tables.ls(name)]
            for process in catalog.processes.ls(name):
                positions += [int(value) for metric, _, value in process.figures if metric == metrics.LOG_POSITION.name]
    return Position(max(positions)) if max(positions) else None


def _run_check(check: StartupCheck, subject: CheckSubject) -> list[PreflightProblem]:
    try:
        return list(check.find(subject))
    except CdcError as exc:
        return [
            _problem_of(
                exc, _subject_of_error(exc, subject.definition) or _subject_text(check.subject, subject.definition)
            )
        ]


def _subject_of_error(exc: CdcError, definition: Definition) -> str | None:
    """Return `publication NAME` or `dsn` if the error's class shows that this object is wrong; otherwise None."""
    if isinstance(exc, PublicationMissing | PublicationNarrowed | PublicationReplaced):
        return f"publication {definition.source.publication.name}"
    if (
        isinstance(exc, SourceReplaced | SourceBehindLog | TimelineChanged | ConfigError)
        or type(exc).code[:6] == "CDC-20"
    ):
        return "dsn"
    return None


def _subject_text(subject: str, definition: Definition) -> str:
    return f"slot {definition.source.slot.name}" if subject == "slot" else subject


def _problem_of(exc: CdcError, subject: str, *, fatal: bool = True) -> PreflightProblem:
    return PreflightProblem(exc.code, subject, f"{exc.message}; {exc.fix}", fatal=fatal)


def _error_of(fatal: list[PreflightProblem]) -> CdcError:
    """Return one error for the fatal problems of a check.

    PreflightFailed lists all problems; an error of another class describes only the first problem.
    """
    first = fatal[0]
    if first.code == PreflightFailed.code:
        listed = "".join(f"\n  {problem.subject}: {problem.message}" for problem in fatal)
        by_hand = (
            None if any(problem.sql for problem in fatal) else "correct the listed problems, then run 'cdc doctor'"
        )
        return PreflightFailed(
            f"the source is not ready for change capture, {len(fatal)} problems:{listed}", remedy=by_hand
        )
    kind = next(error for error in all_error_classes() if error.code == first.code)
    return kind(f"{first.subject}: {first.message}", remedy=first.sql)


def _reason(exc: OSError) -> str:
    return (exc.strerror or "refused").lower()
