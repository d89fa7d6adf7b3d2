"""Audit of a whole log: every data file, the Delta commits, and the two tables against each other.

The audit reads one row group at a time, so memory does not grow with the log. It may run while a reader and a
compaction run. A damaged file is reported, and the audit continues with the other files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from cdc.bucket_files import Root
from cdc.errors import LogCorrupt, LogError
from cdc.log import lost_range_records, parquet_check
from cdc.log.audit import delta_tables
from cdc.log.audit.delta_tables import FOREIGN_WRITER_REMEDY, RESTORE_REMEDY, LogTables
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.audit.rows import CommitClaim, FileContents, Gap, Place, SchemaVersions, Transactions
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.parquet_check import UnreadablePart
from cdc.log.table_io import is_table
from cdc.log.vacuum import OrphanFile, find_orphan_files
from cdc.position import Position
from cdc.table import TableSchema, matches_name

Progress = Callable[[int, int], None]
"""Function that is called after each file with (bytes read, bytes to read)."""
NAMED_ORPHANS: Final = 100
"""Maximum number of orphan files that findings name one by one."""
_SCHEMA_COLUMNS: Final = ("position", "ordinal", "payload")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditScope:
    """Scope of an audit: the tables and bytes to read, the expected source, and the minimum age of orphan files."""

    globs: tuple[str, ...] = ()
    """Patterns of the tables to audit; empty for all.

    With patterns the audit reads only files that may contain rows of these tables. It then does not check whether
    transactions are complete.
    """
    most: int | None = None
    """Maximum bytes of data files to read, newest files first; None for all.

    The audit always checks that every file exists.
    """
    system_id: str | None = None
    """Expected system identifier of the source cluster; None accepts any."""
    grace: float = 0.0
    """Minimum age in seconds of an orphan file that the audit reports."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """Findings and totals of an audit."""

    findings: tuple[AuditFinding, ...]
    files: int
    """Number of data files of both tables."""
    read: int
    """Number of files whose contents were read."""
    rows: int
    size: int
    """Total bytes of the files that were read."""
    durable: Position | None
    horizon: Position | None
    """Position up to which the log is compacted; None if nothing is compacted."""

    @property
    def is_sound(self) -> bool:
        """True if no finding affects the results of reads."""
        return all(finding.is_harmless for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that commands and the API print."""
        return {
            "files": self.files,
            "read": self.read,
            "rows": self.rows,
            "bytes": self.size,
            "durable": None if self.durable is None else str(self.durable),
            "horizon": None if self.horizon is None else str(self.horizon),
            "findings": [finding.to_json() for finding in self.findings],
        }

    @property
    def summary(self) -> str:
        """The totals and the number of findings in one line."""
        counts = f"{self.read:,} of {self.files:,} files read, {self.rows:,} rows, {self.size:,} bytes"
        wrong = sum(not finding.is_harmless for finding in self.findings)
        verdict = f"{wrong:,} findings" if wrong else "no damage found"
        return f"{counts}, up to {self.durable}: {verdict}"


def verify(root: Root, scope: AuditScope | None = None, progress: Progress = lambda _done, _all: None) -> AuditReport:
    """Audit the log under `root`, and return a report; `progress` is called after each file.

    Raises LogError if there is no log, LogFormatUnknown for a newer format.
    """
    if not is_table(root / CHANGES) and not (root / CHANGES / "_delta_log").is_dir():
        raise LogError(
            f"there is no change log at {str(root)!r}",
            remedy="correct log.path, or start the reader, which creates a log",
        )
    return _Verification(root, scope or AuditScope(), progress).run()


def orphan_findings(orphans: Sequence[OrphanFile]) -> Iterator[AuditFinding]:
    """Yield findings about orphan files: one per file up to NAMED_ORPHANS, and one for the rest."""
    for orphan in orphans[:NAMED_ORPHANS]:
        message = f"no commit of the log names this file of {orphan.size:,} bytes"
        yield AuditFinding(
            damage=DamageKind.FOREIGN, message=message, file=orphan.name, remedy="run 'cdc log gc' to remove the file"
        )
    if len(orphans) > NAMED_ORPHANS:
        message = f"{len(orphans) - NAMED_ORPHANS:,} more files exist that no commit names"
        yield AuditFinding(damage=DamageKind.FOREIGN, message=message, remedy="run 'cdc log gc' to remove the files")


class _Verification:
    """One audit of one log: the checks, and the results collected so far."""

    def __init__(self, root: Root, scope: AuditScope, progress: Progress) -> None:
        self._root, self._scope, self._progress = root, scope, progress
        self._tables = LogTables()
        self._versions = SchemaVersions()
        self._places: dict[str, set[Place]] = {CHANGES: set(), COMPACTED: set()}
        self._schemas_are_whole = True
        self._missing: list[CommitClaim] = []
        self._unseen: list[tuple[int, int]] = []
        self._unchecked = self._read = self._rows = self._done = 0

    def run(self) -> AuditReport:
        """Run all checks, the cheap ones first, and return the report."""
        self._tables = tables = delta_tables.read_log_tables(self._root, self._scope.system_id)
        schemas = sorted((c for c in tables.claims if c.has_schemas_only), key=lambda claim: claim.first)
        self._read_schemas(schemas)
        self._report_lost_ranges(schemas)
        sizes = {name: delta_tables.sizes(self._root / name) for name in (CHANGES, COMPACTED)}
        present = [claim for claim in tables.claims if self._is_there(claim, sizes[claim.table])]
        self._report_missing_files()
        chosen = self._files_to_read(present)
        names = {claim.path for claim in chosen}
        self._unseen += [(c.first, c.last) for c in tables.claims if c.table == CHANGES and c.path not in names]
        total = sum(claim.size for claim in chosen)
        self._scan_changes([claim for claim in chosen if claim.table == CHANGES], total)
        for claim in (claim for claim in chosen if claim.table == COMPACTED):
            self._scan(claim, total)
        self._check_whole_log()
        return AuditReport(
            findings=tuple(tables.findings),
            files=len(tables.claims),
            read=self._read,
            rows=self._rows,
            size=self._done,
            durable=tables.durable,
            horizon=tables.horizon,
        )

    def _read_schemas(self, claims: Sequence[CommitClaim]) -> None:
        """Collect every readable schema row; problems in the files are reported later, by `_scan`."""
        for claim in claims:

            def consume(rows: pa.Table, claim: CommitClaim = claim) -> None:
                for row in rows.to_pylist():
                    self._add_schema(claim, (row["position"], row["ordinal"]), row["payload"])

            try:
                check = parquet_check.read(self._root / claim.table / claim.name, consume, _SCHEMA_COLUMNS)
            except FileNotFoundError:
                self._schemas_are_whole = False
            else:
                self._schemas_are_whole = self._schemas_are_whole and not check.unread

    def _add_schema(self, claim: CommitClaim, place: Place, payload: bytes) -> None:
        try:
            schema = TableSchema.from_json(payload)
        except (ValueError, KeyError, TypeError):
            self._report_file(claim, DamageKind.CONTENTS, f"the schema row at ordinal {place[1]} cannot be read")
            self._schemas_are_whole = False
            return
        self._places[claim.table].add(place)
        self._versions.add(place, schema)

    def _is_there(self, claim: CommitClaim, sizes: Mapping[str, int]) -> bool:
        """Return True if a file exists and has the size that its commit records.

        `sizes` maps file names to sizes. For a file that is not in `sizes`, the method asks the storage.
        """
        try:
            # a new file may not be in the listing yet
            size = sizes.get(claim.name) or (self._root / claim.table / claim.name).stat().st_size
        except FileNotFoundError:
            self._missing.append(claim)
            return False
        if size != claim.size:
            self._report_file(
                claim, DamageKind.SIZE, f"the file has {size:,} bytes, but its commit records {claim.size:,}"
            )
        return size == claim.size

    def _report_missing_files(self) -> None:
        """Report each missing file that the current version of its table names."""
        listed = delta_tables.listed_files(self._root) if self._missing else set()
        for claim in self._missing:
            if claim.path in listed:
                self._report_file(claim, DamageKind.MISSING, "the file is missing")

    def _report_lost_ranges(self, claims: Sequence[CommitClaim]) -> None:
        """Report the ranges of positions whose rows were dropped with a damaged file.

        Missing rows inside these ranges cause no further findings.
        """
        for claim in claims:
            if claim.table == CHANGES and (ends := lost_range_records.range_in_file_name(claim.name)) is not None:
                self._unseen.append(ends)
                found = self._file_finding(
                    claim, DamageKind.LOST, "this file is the record of rows that were lost with a damaged file"
                )
                remedy = "run 'cdc tables resync' for the tables that are marked needs_resync"
                self._tables.findings.append(replace(found, first=ends[0], last=ends[1], remedy=remedy))

    def _files_to_read(self, claims: Sequence[CommitClaim]) -> list[CommitClaim]:
        """Return the claims of the files that the scope selects for reading, sorted by first position."""
        globs = self._scope.globs
        found = [c for c in claims if not globs or any(matches_name(topic, globs) for topic in self._topics(c))]
        found.sort(key=lambda claim: (claim.first, claim.name))
        if self._scope.most is None:
            return found
        room = np.cumsum([claim.size for claim in reversed(found)]) <= self._scope.most
        return found[len(found) - int(room.sum()) :]

    def _scan_changes(self, claims: Sequence[CommitClaim], total: int) -> None:
        """Read the files of `changes`, and check the transactions across these files."""
        transactions = Transactions(self._tables.oldest)
        for number, claim in enumerate(claims):
            contents = self._scan(claim, total)
            if contents is None:
                self._unseen.append((claim.first, claim.last))
            for found in () if contents is None or self._scope.globs else contents.runs:
                transactions.add(number, found)
            following = claims[number + 1].first if number + 1 < len(claims) else None
            for gap in transactions.check_below(following, self._unseen):
                self._report_gap(gap, claims[gap.file])

    def _scan(self, claim: CommitClaim, total: int) -> FileContents | None:
        """Read a file, report its faults, and return a summary of its rows; None if a part is missing or unreadable."""
        contents = FileContents()
        try:
            check = parquet_check.read(self._root / claim.table / claim.name, contents.add, size=claim.size)
        except FileNotFoundError:  # a vacuum deleted it after the listing
            return None
        self._read, self._rows, self._done = self._read + 1, self._rows + contents.rows, self._done + claim.size
        self._progress(self._done, total)
        for unread in check.unread:
            self._report_unreadable(claim, unread)
        if check.unread:
            return None
        self._unchecked += not check.has_checksums
        for damage, message in contents.faults(claim):
            self._report_file(claim, damage, message)
        if self._schemas_are_whole:
            self._report_missing_schemas(claim, contents)
        return contents

    def _check_whole_log(self) -> None:
        """Run the checks that need the results of all files."""
        horizon, found = self._tables.horizon, self._tables.findings
        if horizon is not None and self._schemas_are_whole:
            lost = {place for place in self._places[CHANGES] if place[0] <= horizon} - self._places[COMPACTED]
            if lost:
                message = f"{COMPACTED!r} does not contain {len(lost):,} schema rows of the changes up to its horizon"
                found.append(
                    delta_tables.contradiction(f"{message}: the first missing one is at {Position(min(lost)[0])!s}")
                )
        if self._unchecked:
            message = f"{self._unchecked:,} files have no page checksums: an older version of cdc wrote these files"
            remedy = "do nothing: the reader removes these files when it trims their segments"
            found.append(AuditFinding(damage=DamageKind.UNCHECKED, message=message, remedy=remedy))
        try:
            found += orphan_findings(find_orphan_files(self._root, self._scope.grace))
        except (DeltaError, LogCorrupt):
            return  # reported when the tables were opened

    def _report_unreadable(self, claim: CommitClaim, unread: UnreadablePart) -> None:
        relations = self._relations(claim) if unread.relations is None else unread.relations
        found = self._file_finding(claim, DamageKind.UNREADABLE, unread.message)
        first = claim.first if unread.first is None else unread.first
        last = claim.last if unread.last is None else unread.last
        self._tables.findings.append(replace(found, first=first, last=last, tables=self._names(relations)))

    def _report_missing_schemas(self, claim: CommitClaim, contents: FileContents) -> None:
        for relation, place, message in self._versions.faults(contents):
            found = self._file_finding(claim, DamageKind.VERSION, message)
            first, remedy = Position(place[0]), "copy the table again with 'cdc tables resync'"
            self._tables.findings.append(replace(found, first=first, tables=self._names([relation]), remedy=remedy))

    def _report_gap(self, gap: Gap, claim: CommitClaim) -> None:
        more = f"; {gap.transactions - 1:,} more transactions have the same damage" if gap.transactions > 1 else ""
        what = "has missing rows before" if gap.damage is DamageKind.HOLE else "has two rows with"
        first, last = Position(gap.first), Position(gap.last)
        found = self._file_finding(claim, gap.damage, f"transaction {first!s} {what} ordinal {gap.ordinal}{more}")
        self._tables.findings.append(replace(found, first=first, last=last, remedy=FOREIGN_WRITER_REMEDY))

    def _report_file(self, claim: CommitClaim, damage: DamageKind, message: str) -> None:
        self._tables.findings.append(self._file_finding(claim, damage, message))

    def _file_finding(self, claim: CommitClaim, damage: DamageKind, message: str) -> AuditFinding:
        """Return a finding about a whole file."""
        return AuditFinding(
            damage=damage,
            message=message,
            file=claim.path,
            first=claim.first,
            last=claim.last,
            tables=self._names(self._relations(claim)),
            remedy=RESTORE_REMEDY,
        )

    def _topics(self, claim: CommitClaim) -> set[str]:
        """Return all topics that the tables in a file ever had."""
        return {topic for relation in self._relations(claim) for topic in self._versions.topics(relation)}

    def _relations(self, claim: CommitClaim) -> Collection[int]:
        if claim.relations is None:
            return ()
        return self._versions.within(claim.relations) or sorted(set(claim.relations))

    def _names(self, relations: Collection[int]) -> tuple[str, ...]:
        return tuple(sorted(self._versions.name(relation) for relation in relations))
