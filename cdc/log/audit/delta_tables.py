"""Audit of the two Delta tables of the log: commits, checkpoints, positions, and agreement of the tables.

Every commit after the last readable checkpoint must exist. Positions must satisfy oldest ≤ horizon ≤ durable and floor
≤ horizon. Files of consumers and records of removed files must be readable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from cdc.bucket_files import BucketPath, Root
from cdc.delta_protocol.commits import commit_file, commit_name
from cdc.errors import LogCorrupt
from cdc.log import consumers, epoch_and_slot_records, retired_files
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.audit.rows import CommitClaim
from cdc.log.disk_format import CHANGES, COMPACTED, CommitInfo, LogIdentity, floor_id, trimmed_id
from cdc.log.parquet_check import open_for_random_access
from cdc.log.table_io import (
    add_actions,
    is_table,
    last_commit_info,
    open_table,
    parquet_file,
    transaction_version,
)
from cdc.position import Position

RESTORE_REMEDY: Final = (
    "restore the file from a backup; without a backup run 'cdc log drop-file FILE', which prints what is lost"
)
FOREIGN_WRITER_REMEDY: Final = "find out which other program writes to the log, then restore the log from a backup"
_ZERO: Final = Position(0)
_END: Final = Position((1 << 63) - 1)
_COMMIT: Final = re.compile(r"(\d{20})\.json\Z")
_CHECKPOINT: Final = re.compile(r"(\d{20})\.checkpoint(?:\..*)?\.parquet\Z")
_FOLDER: Final = "_delta_log"
_TORN: Final = (
    "after a power loss start the reader, which replaces an unconfirmed commit; in other cases restore the file from a "
    "backup"
)
_RESTORE: Final = "restore the file from a backup: only this file records which data files belong to the table"


@dataclass(slots=True)
class LogTables:
    """The files and positions of the tables `changes` and `compacted`, and the findings about the tables."""

    findings: list[AuditFinding] = field(default_factory=list)
    claims: list[CommitClaim] = field(default_factory=list)
    """What the commits record about the data files of both tables: one CommitClaim for each file."""
    durable: Position | None = None
    oldest: Position = _ZERO
    horizon: Position | None = None
    """Position up to which the log is compacted; None if nothing is compacted."""


@dataclass(frozen=True, slots=True)
class _Table:
    path: Root
    delta: DeltaTable
    identity: LogIdentity

    def version(self, application: str) -> Position | None:
        found = transaction_version(self.path, self.delta, application)
        return None if found is None else Position(found)

    def actions(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = add_actions(self.path, self.delta).to_pylist()
        return listed


def read_log_tables(root: Root, system_id: str | None = None) -> LogTables:
    """Read the tables of the log under `root`, and return them with the findings about them.

    `system_id` is the expected system identifier of the source cluster. Raises LogFormatUnknown for a newer format.
    """
    found = LogTables()
    # `compacted` is read first, so that its horizon cannot be newer than the durable position
    compacted = _open(root, COMPACTED, found) if is_table(root / COMPACTED) else None
    changes = _open(root, CHANGES, found)
    log_id = "" if changes is None else str(changes.delta.metadata().id)
    if changes is not None:
        found.durable, found.oldest = changes.version(log_id), changes.version(trimmed_id(log_id)) or _ZERO
        if compacted is not None and (compacted.version(log_id) or _ZERO) < found.oldest:
            compacted = _open(root, COMPACTED, found)  # a compaction and a trim came in between
        ranges = read_commits(changes.path, log_id)
        found.findings += ranges.findings
        upto = found.durable or _ZERO
        found.claims += [
            CommitClaim.of(CHANGES, action, ranges.ranges.get(action["path"], (_ZERO, upto)))
            for action in changes.actions()
        ]
        found.findings += [*_source_faults(changes, system_id), *_other_file_faults(root, upto)]
    if compacted is not None:
        found.horizon = compacted.version(log_id)
        found.findings += read_commits(compacted.path, log_id).findings
        upto = _END if changes is None else found.horizon or _ZERO
        found.claims += [CommitClaim.of(COMPACTED, action, (_ZERO, upto)) for action in compacted.actions()]
    if changes is not None:
        found.findings += _position_faults(found, changes, compacted, log_id)
    return found


def listed_files(root: Root) -> set[str]:
    """Return the paths of the current data files of both tables, relative to the log's root.

    A table that cannot be opened contributes no files.
    """
    found: set[str] = set()
    for name in (CHANGES, COMPACTED):
        with suppress(LogCorrupt):
            listed = add_actions(root / name, open_table(root / name))["path"].to_pylist()
            found |= {f"{name}/{path}" for path in listed}
    return found


def sizes(table: Root) -> Mapping[str, int]:
    """Return the size in bytes of every file of a table in an object store, by path; empty for a local directory.

    All sizes come from one listing.
    """
    return table.sizes() if isinstance(table, BucketPath) else {}


def contradiction(message: str, remedy: str = FOREIGN_WRITER_REMEDY) -> AuditFinding:
    """Return a finding that two parts of the log contradict each other."""
    return AuditFinding(damage=DamageKind.MISFIT, message=message, remedy=remedy)


@dataclass(slots=True)
class CommitHistory:
    """Result of reading the existing commits of one table: the position range of each data file, and the findings."""

    findings: list[AuditFinding] = field(default_factory=list)
    ranges: dict[str, tuple[Position, Position]] = field(default_factory=dict)
    """Path of a data file, relative to the table → the range (after, upto] of positions that its commit appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """Content of one commit: its position, the data files that it adds, and their numbers of rows."""

    position: int | None
    """Position in the `txn` action of the commit; None if the commit has no such action."""
    added: Mapping[str, int]
    """Path of each data file that the commit adds → its number of rows."""
    rows: int
    """Number of added rows as the metadata of the commit records it; 0 if the metadata has no such number."""


def read_commits(table: Root, log_id: str) -> CommitHistory:
    """Read and check every commit and checkpoint of a Delta table.

    `log_id` is the application id of the `txn` actions that contain the positions.
    """
    found = CommitHistory()
    folder = table / _FOLDER
    names = {place.name: place for place in folder.iterdir()}
    versions = sorted(int(match[1]) for name in names if (match := _COMMIT.match(name)))
    readable = [int(match[1]) for name in names if (match := _CHECKPOINT.match(name)) and _is_readable(names[name])]
    broken = [name for name in names if _CHECKPOINT.match(name) and int(name[:20]) not in readable]
    for name in sorted(broken):
        found.findings.append(_finding(table, name, "the checkpoint cannot be read", _RESTORE))
    for first, last in missing_commits(versions, readable):
        message = (
            "the commit is missing" if first == last else f"this and the next {last - first:,} commits are missing"
        )
        found.findings.append(_finding(table, commit_file(table, first).name, message, _RESTORE))
    before: int | None = None
    for version in versions:
        try:
            commit = parse_commit(names[commit_file(table, version).name].read_text(encoding="utf-8"), log_id)
        except FileNotFoundError:  # cleaned up after the listing
            continue
        except (ValueError, KeyError, TypeError, AttributeError):
            remedy = _TORN if version == versions[-1] else _RESTORE
            found.findings.append(_finding(table, commit_name(version), "the commit cannot be read", remedy))
            before = None
            continue
        found.findings += _faults(table, version, commit, before)
        if before is not None and commit.position is not None and commit.position > before:
            ends = Position(before), Position(commit.position)
            found.ranges |= dict.fromkeys(commit.added, ends)
        before = commit.position if commit.position is not None else 0 if version == 0 else before
    return found


def missing_commits(versions: Sequence[int], checkpoints: Collection[int]) -> list[tuple[int, int]]:
    """Return the first and last missing version of each gap in the commits after the last readable checkpoint.

    `versions` are the existing commits, ascending. `checkpoints` are the versions of the readable checkpoints.
    """
    start = max(checkpoints, default=-1)
    existing = [start, *(version for version in versions if version > start)]
    return [(before + 1, after - 1) for before, after in pairwise(existing) if after - before > 1]


def parse_commit(text: str, log_id: str) -> CommitRecord:
    """Parse the text of a commit file.

    Raises ValueError, KeyError, TypeError or AttributeError if the text is not a valid commit.
    """
    actions = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not actions:
        raise ValueError("the commit file is empty")
    metadata: dict[str, Any] = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
    positions = [a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] == log_id]
    added = (action["add"] for action in actions if "add" in action)
    return CommitRecord(
        position=positions[0] if positions else None,
        added={add["path"]: _count(add) for add in added},
        rows=int(metadata.get("cdc.rows", 0)),
    )


def _open(root: Root, name: str, found: LogTables) -> _Table | None:
    path = root / name
    try:
        delta = open_table(path)
    except (DeltaError, LogCorrupt) as exc:
        found.findings += read_commits(path, "").findings
        reason = str(exc.__cause__ or exc).splitlines()[0][:160]
        message = f"the table cannot be opened: {reason}"
        found.findings.append(AuditFinding(damage=DamageKind.COMMIT, file=name, message=message, remedy=RESTORE_REMEDY))
        return None
    return _Table(path, delta, LogIdentity.from_description(delta.metadata().description))


def _position_faults(
    found: LogTables, changes: _Table, compacted: _Table | None, log_id: str
) -> Iterator[AuditFinding]:
    """Yield findings about contradictory positions of the two tables, and about tables of different logs or sources.

    Expected are oldest ≤ horizon ≤ durable and floor ≤ horizon.
    """
    if compacted is None:
        if found.oldest:
            yield contradiction(f"changes up to {found.oldest!s} were trimmed, but table {COMPACTED!r} is missing")
        return
    horizon = found.horizon
    if horizon is None:
        if found.oldest or compacted.actions():
            yield contradiction(f"table {COMPACTED!r} belongs to another log than table {CHANGES!r}")
        return
    floor = compacted.version(floor_id(log_id)) or _ZERO
    if not found.oldest <= horizon <= (found.durable or _ZERO) or floor > horizon:
        positions = f"oldest {found.oldest!s}, floor {floor!s}, horizon {horizon!s}, durable {found.durable!s}"
        yield contradiction(f"positions violate oldest ≤ horizon ≤ durable or floor ≤ horizon: {positions}")
    if compacted.identity != changes.identity:
        yield contradiction(f"table {COMPACTED!r} names another source database than table {CHANGES!r}")


def _source_faults(changes: _Table, wanted: str | None) -> Iterator[AuditFinding]:
    last = CommitInfo.from_metadata(last_commit_info(changes.path, changes.delta))
    actual = (last.system_id if last is not None else "") or changes.identity.system_id
    if wanted not in {None, actual}:
        message = f"the log was written from cluster {actual}, but source.dsn points at cluster {wanted}"
        remedy = "point source.dsn at the log's cluster, or log.path at the log of the cluster in source.dsn"
        yield AuditFinding(damage=DamageKind.SOURCE, message=message, remedy=remedy)


def _other_file_faults(root: Root, end: Position) -> Iterator[AuditFinding]:
    """Yield findings about unreadable records of the log, and about consumers that are ahead of the log.

    The records are those of consumers, of removed files and of a pending epoch.
    """
    for read in (
        consumers.list_consumers,
        retired_files.list_removals,
        epoch_and_slot_records.read_pending_epoch,
    ):
        try:
            read(root)
        except LogCorrupt as exc:
            yield contradiction(exc.message, "restore the file from a backup; without a backup remove the file")
    for consumer in consumers.list_readable_consumers(root)[0]:
        if consumer.position > end:
            message = f"consumer {consumer.name!r} has read up to {consumer.position!s}, but the log ends at {end!s}"
            yield contradiction(message, "if an older copy of the log was restored, restore the latest copy instead")


def _count(add: Mapping[str, Any]) -> int:
    return int(json.loads(add.get("stats") or "{}").get("numRecords", 0))


def _faults(table: Root, version: int, commit: CommitRecord, before: int | None) -> Iterator[AuditFinding]:
    name = commit_name(version)
    if before is not None and commit.position is not None and commit.position < before:
        text = f"the position decreases from {Position(before)!s} to {Position(commit.position)!s}"
        yield _finding(table, name, text, "find out which other program writes to the table")
    count = sum(commit.added.values())
    is_append = before is not None and commit.position is not None and commit.position > before
    if is_append and commit.rows and commit.added and commit.rows != count:
        yield _finding(
            table, name, f"the commit records {commit.rows:,} rows, but its files have {count:,} rows", _RESTORE
        )


def _is_readable(checkpoint: Root) -> bool:
    """Return True if the checkpoint can be read, or if it no longer exists because it was cleaned up."""
    with suppress(FileNotFoundError):
        try:
            parquet_file(open_for_random_access(checkpoint)).read(use_threads=False)
        except (OSError, pa.ArrowException) as exc:
            return isinstance(exc, FileNotFoundError)
    return True


def _finding(table: Root, name: str, message: str, remedy: str) -> AuditFinding:
    return AuditFinding(damage=DamageKind.COMMIT, file=f"{table.name}/{_FOLDER}/{name}", message=message, remedy=remedy)
