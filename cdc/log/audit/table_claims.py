"""Audit of both Delta tables: their positions, their file listings, and whether they are consistent."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.errors import LogCorrupt
from cdc.log import consumers, pending_epoch, removed_files
from cdc.log.audit import commits
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.audit.rows import CommitClaim
from cdc.log.layout import CHANGES, COMPACTED, CommitInfo, LogIdentity, floor_id, trimmed_id
from cdc.log.object_path import BucketPath, Root
from cdc.log.storage import is_table, last_commit_info, open_table
from cdc.position import Position

RESTORE_REMEDY: Final = (
    "restore the file from a backup; without one run 'cdc log drop-file FILE', which prints what is lost"
)
FOREIGN_WRITER_REMEDY: Final = "find out which other program writes to the log, and restore the log from a backup"
_ZERO: Final = Position(0)
_END: Final = Position((1 << 63) - 1)


@dataclass(slots=True)
class LogTables:
    """Both tables at one moment."""

    findings: list[AuditFinding] = field(default_factory=list)
    claims: list[CommitClaim] = field(default_factory=list)
    """Of the files of both."""
    durable: Position | None = None
    oldest: Position = _ZERO
    horizon: Position | None = None
    """None if nothing is compacted."""


@dataclass(frozen=True, slots=True)
class _Table:
    path: Root
    delta: DeltaTable
    identity: LogIdentity

    def version(self, application: str) -> Position | None:
        found = self.delta.transaction_version(application)
        return None if found is None else Position(found)

    def actions(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = pa.table(self.delta.get_add_actions(flatten=True)).to_pylist()
        return listed


def read_log_tables(root: Root, system_id: str | None = None) -> LogTables:
    """The tables of the log under root; system_id: of the cluster that it must have been written from.

    Raises LogFormatUnknown if one is of a newer format.
    """
    found = LogTables()
    # in this order the horizon is not beyond the end of the changes for having been looked at later
    compacted = _opened(root, COMPACTED, found) if is_table(root / COMPACTED) else None
    changes = _opened(root, CHANGES, found)
    log_id = "" if changes is None else str(changes.delta.metadata().id)
    if changes is not None:
        found.durable, found.oldest = changes.version(log_id), changes.version(trimmed_id(log_id)) or _ZERO
        if compacted is not None and (compacted.version(log_id) or _ZERO) < found.oldest:
            compacted = _opened(root, COMPACTED, found)  # compacted and trimmed in between
        ranges = commits.look(changes.path, log_id)
        found.findings += ranges.findings
        upto = found.durable or _ZERO
        found.claims += [
            CommitClaim.of(CHANGES, action, ranges.ranges.get(action["path"], (_ZERO, upto)))
            for action in changes.actions()
        ]
        found.findings += [*_source_faults(changes, system_id), *_beside(root, upto)]
    if compacted is not None:
        found.horizon = compacted.version(log_id)
        found.findings += commits.look(compacted.path, log_id).findings
        upto = _END if changes is None else found.horizon or _ZERO
        found.claims += [CommitClaim.of(COMPACTED, action, (_ZERO, upto)) for action in compacted.actions()]
    if changes is not None:
        found.findings += _misfits(found, changes, compacted, log_id)
    return found


def listed_files(root: Root) -> set[str]:
    """The files of both tables now, relative to the log's root; of none that cannot be opened."""
    found: set[str] = set()
    for name in (CHANGES, COMPACTED):
        with suppress(LogCorrupt):
            listed = pa.table(open_table(root / name).get_add_actions())["path"].to_pylist()
            found |= {f"{name}/{path}" for path in listed}
    return found


def sizes(table: Root) -> Mapping[str, int]:
    """Bytes of every file of a table in an object store, where a look at each is a request; by path. Else nothing."""
    return table.sizes() if isinstance(table, BucketPath) else {}


def contradiction(message: str, remedy: str = FOREIGN_WRITER_REMEDY) -> AuditFinding:
    """A contradiction."""
    return AuditFinding(damage=DamageKind.MISFIT, message=message, remedy=remedy)


def _opened(root: Root, name: str, found: LogTables) -> _Table | None:
    path = root / name
    try:
        delta = open_table(path)
    except (DeltaError, LogCorrupt) as exc:
        found.findings += commits.look(path, "").findings
        reason = str(exc.__cause__ or exc).splitlines()[0][:160]
        message = f"the table cannot be opened: {reason}"
        found.findings.append(AuditFinding(damage=DamageKind.COMMIT, file=name, message=message, remedy=RESTORE_REMEDY))
        return None
    return _Table(path, delta, LogIdentity.from_description(delta.metadata().description))


def _misfits(found: LogTables, changes: _Table, compacted: _Table | None, log_id: str) -> Iterator[AuditFinding]:
    """Positions have to be oldest ≤ horizon ≤ durable, floor ≤ horizon."""
    if compacted is None:
        if found.oldest:
            yield contradiction(f"changes up to {found.oldest!s} were trimmed, and {COMPACTED!r} is not there")
        return
    horizon = found.horizon
    if horizon is None:
        if found.oldest or compacted.delta.get_add_actions().num_rows:
            yield contradiction(f"{COMPACTED!r} was compacted from another log")
        return
    floor = compacted.version(floor_id(log_id)) or _ZERO
    if not found.oldest <= horizon <= (found.durable or _ZERO) or floor > horizon:
        said = f"oldest {found.oldest!s}, floor {floor!s}, horizon {horizon!s}, end {found.durable!s}"
        yield contradiction(f"the two tables do not fit: {said}")
    if compacted.identity != changes.identity:
        yield contradiction(f"{COMPACTED!r} was made for another source than {CHANGES!r}")


def _source_faults(changes: _Table, wanted: str | None) -> Iterator[AuditFinding]:
    last = CommitInfo.from_metadata(last_commit_info(changes.path, changes.delta))
    ours = (last.system_id if last is not None else "") or changes.identity.system_id
    if wanted not in {None, ours}:
        message = f"the log was written from cluster {ours}, the definition's source is cluster {wanted}"
        remedy = "point source.dsn at the log's cluster, or log.path at that cluster's log"
        yield AuditFinding(damage=DamageKind.SOURCE, message=message, remedy=remedy)


def _beside(root: Root, end: Position) -> Iterator[AuditFinding]:
    """What lies beside the tables: every file readable, nobody further than the log."""
    for read in (consumers.list_consumers, removed_files.list_removals, pending_epoch.read_pending_epoch):
        try:
            read(root)
        except LogCorrupt as exc:
            yield contradiction(exc.message, "remove the file if there is no backup of it")
    for consumer in consumers.list_readable_consumers(root)[0]:
        if consumer.position > end:
            message = f"consumer {consumer.name!r} has read up to {consumer.position!s}, and the log ends at {end!s}"
            yield contradiction(message, "the log may have been replaced by an older copy: restore the latest copy")
