"""Audit of a whole log: every data file, the Delta commits, and the two tables against each other.

Reads row group after row group, so memory does not grow with the log; may run beside a reader and a compaction. What is
damaged is told and passed over: everything else is looked at all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
from deltalake.exceptions import DeltaError

from cdc.errors import LogCorrupt, LogError
from cdc.log import lost_ranges, parquet_check
from cdc.log.audit import table_claims
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.audit.orphan_files import find_orphan_files, orphan_findings
from cdc.log.audit.rows import CommitClaim, FileContents, Place, SchemaVersions
from cdc.log.audit.table_claims import FOREIGN_WRITER_REMEDY, RESTORE_REMEDY, LogTables
from cdc.log.audit.transactions import Gap, Transactions
from cdc.log.layout import CHANGES, COMPACTED
from cdc.log.object_path import Root
from cdc.log.parquet_check import UnreadablePart
from cdc.log.storage import is_table
from cdc.position import Position
from cdc.table import TableSchema, matches_name

Progress = Callable[[int, int], None]
"""(bytes read, bytes to read)."""
_SCHEMA_COLUMNS: Final = ("position", "ordinal", "payload")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditScope:
    """How much is looked at."""

    globs: tuple[str, ...] = ()
    """Only files that may hold rows of these tables; then transactions are not asked whether they are whole."""
    most: int | None = None
    """Bytes of data files that are read, the newest; None for all. That they are there is asked of all."""
    system_id: str | None = None
    """Of the cluster that the log must have been written from, None if it does not matter."""
    grace: float = 0.0
    """Seconds for which a file that belongs to nothing is no finding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditReport:
    """What was found."""

    findings: tuple[AuditFinding, ...]
    files: int
    """Data files of both tables."""
    read: int
    """Of these the ones whose contents were read."""
    rows: int
    size: int
    """Bytes of those that were read."""
    durable: Position | None
    horizon: Position | None
    """None if nothing is compacted."""

    @property
    def is_sound(self) -> bool:
        """Whether there is nothing that could make a read wrong."""
        return all(finding.is_harmless for finding in self.findings)

    def to_json(self) -> dict[str, Any]:
        """As commands and the API print it."""
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
        """One line."""
        looked = f"{self.read:,} of {self.files:,} files read, {self.rows:,} rows, {self.size:,} bytes"
        wrong = sum(not finding.is_harmless for finding in self.findings)
        verdict = f"{wrong:,} findings" if wrong else "all as it was written"
        return f"{looked}, up to {self.durable}: {verdict}"


def verify(root: Root, scope: AuditScope | None = None, progress: Progress = lambda _done, _all: None) -> AuditReport:
    """Look at the log under root; raises LogError if there is none, LogFormatUnknown if it is of a newer format."""
    if not is_table(root / CHANGES) and not (root / CHANGES / "_delta_log").is_dir():
        raise LogError(f"no change log at {str(root)!r}", remedy="check log.path, and that the reader has run once")
    return _Verification(root, scope or AuditScope(), progress).run()


class _Verification:
    """One look at one log."""

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
        """All of it, the cheap before the dear."""
        self._tables = tables = table_claims.read_log_tables(self._root, self._scope.system_id)
        schemas = sorted((c for c in tables.claims if c.has_schemas_only), key=lambda claim: claim.first)
        self._read_schemas(schemas)
        self._tell_lost(schemas)
        sizes = {name: table_claims.sizes(self._root / name) for name in (CHANGES, COMPACTED)}
        present = [claim for claim in tables.claims if self._is_there(claim, sizes[claim.table])]
        self._tell_missing()
        chosen = self._chosen(present)
        names = {claim.path for claim in chosen}
        self._unseen += [(c.first, c.last) for c in tables.claims if c.table == CHANGES and c.path not in names]
        total = sum(claim.size for claim in chosen)
        self._scan_changes([claim for claim in chosen if claim.table == CHANGES], total)
        for claim in (claim for claim in chosen if claim.table == COMPACTED):
            self._scan(claim, total)
        self._conclude()
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
        """Every schema row that can be read; what is wrong with their files is told when those are scanned."""
        for claim in claims:

            def take(rows: pa.Table, claim: CommitClaim = claim) -> None:
                for row in rows.to_pylist():
                    self._take_schema(claim, (row["position"], row["ordinal"]), row["payload"])

            try:
                outcome = parquet_check.read(self._root / claim.table / claim.name, take, _SCHEMA_COLUMNS)
            except FileNotFoundError:
                self._schemas_are_whole = False
            else:
                self._schemas_are_whole = self._schemas_are_whole and not outcome.unread

    def _take_schema(self, claim: CommitClaim, place: Place, payload: bytes) -> None:
        try:
            schema = TableSchema.from_json(payload)
        except (ValueError, KeyError, TypeError):
            self._damaged(claim, DamageKind.CONTENTS, f"the schema row at ordinal {place[1]} cannot be read")
            self._schemas_are_whole = False
            return
        self._places[claim.table].add(place)
        self._versions.add(place, schema)

    def _is_there(self, claim: CommitClaim, sizes: Mapping[str, int]) -> bool:
        """Whether a file is there and as long as it should be; sizes: of those whose size is known already."""
        try:
            # what a listing lacks may only be late in it
            size = sizes.get(claim.name) or (self._root / claim.table / claim.name).stat().st_size
        except FileNotFoundError:
            self._missing.append(claim)
            return False
        if size != claim.size:
            self._damaged(claim, DamageKind.SIZE, f"the file has {size:,} bytes, but its commit records {claim.size:,}")
        return size == claim.size

    def _tell_missing(self) -> None:
        """The files that are not there; one that left its table meanwhile is no finding."""
        held = table_claims.listed_files(self._root) if self._missing else set()
        for claim in self._missing:
            if claim.path in held:
                self._damaged(claim, DamageKind.MISSING, "the file is missing")

    def _tell_lost(self, claims: Sequence[CommitClaim]) -> None:
        """The ranges of which rows were given up: nothing more is missing where those have been."""
        for claim in claims:
            if claim.table == CHANGES and (ends := lost_ranges.range_in_file_name(claim.name)) is not None:
                self._unseen.append(ends)
                found = self._about(claim, DamageKind.LOST, "records rows that were lost with a damaged file")
                remedy = "copy the tables that still need it again with 'cdc tables resync'"
                self._tables.findings.append(replace(found, first=ends[0], last=ends[1], remedy=remedy))

    def _chosen(self, claims: Sequence[CommitClaim]) -> list[CommitClaim]:
        """The files whose contents are read, in order of their first position."""
        globs = self._scope.globs
        found = [c for c in claims if not globs or any(matches_name(topic, globs) for topic in self._called(c))]
        found.sort(key=lambda claim: (claim.first, claim.name))
        if self._scope.most is None:
            return found
        room = np.cumsum([claim.size for claim in reversed(found)]) <= self._scope.most
        return found[len(found) - int(room.sum()) :]

    def _scan_changes(self, claims: Sequence[CommitClaim], total: int) -> None:
        """The files of `changes`, and the transactions over them."""
        transactions = Transactions(self._tables.oldest)
        for number, claim in enumerate(claims):
            contents = self._scan(claim, total)
            if contents is None:
                self._unseen.append((claim.first, claim.last))
            for found in () if contents is None or self._scope.globs else contents.runs:
                transactions.add(number, found)
            following = claims[number + 1].first if number + 1 < len(claims) else None
            for gap in transactions.settled(following, self._unseen):
                self._tell_gap(gap, claims[gap.file])

    def _scan(self, claim: CommitClaim, total: int) -> FileContents | None:
        """What the rows of a file come to; None if not all of it can be read."""
        contents = FileContents()
        try:
            outcome = parquet_check.read(self._root / claim.table / claim.name, contents.add, size=claim.size)
        except FileNotFoundError:  # swept since it was listed
            return None
        self._read, self._rows, self._done = self._read + 1, self._rows + contents.rows, self._done + claim.size
        self._progress(self._done, total)
        for unread in outcome.unread:
            self._tell_unread(claim, unread)
        if outcome.unread:
            return None
        self._unchecked += not outcome.has_checksums
        for damage, message in contents.faults(claim):
            self._damaged(claim, damage, message)
        if self._schemas_are_whole:
            self._tell_unversioned(claim, contents)
        return contents

    def _conclude(self) -> None:
        """What only the whole tells."""
        horizon, found = self._tables.horizon, self._tables.findings
        if horizon is not None and self._schemas_are_whole:
            lost = {place for place in self._places[CHANGES] if place[0] <= horizon} - self._places[COMPACTED]
            if lost:
                message = f"{COMPACTED!r} contains rows of {len(lost):,} table versions without their schema rows"
                found.append(table_claims.contradiction(f"{message}: the first is at {Position(min(lost)[0])!s}"))
        if self._unchecked:
            message = f"{self._unchecked:,} files have no page checksums: an older version wrote them"
            remedy = "nothing to do: they are removed when their segments are compacted and trimmed"
            found.append(AuditFinding(damage=DamageKind.UNCHECKED, message=message, remedy=remedy))
        try:
            found += orphan_findings(find_orphan_files(self._root, self._scope.grace))
        except (DeltaError, LogCorrupt):
            return  # told when the tables were opened

    def _tell_unread(self, claim: CommitClaim, unread: UnreadablePart) -> None:
        relations = self._relations(claim) if unread.relations is None else unread.relations
        found = self._about(claim, DamageKind.UNREADABLE, unread.message)
        first = claim.first if unread.first is None else unread.first
        last = claim.last if unread.last is None else unread.last
        self._tables.findings.append(replace(found, first=first, last=last, tables=self._names(relations)))

    def _tell_unversioned(self, claim: CommitClaim, contents: FileContents) -> None:
        for relation, place, message in self._versions.faults(contents):
            found = self._about(claim, DamageKind.VERSION, message)
            first, remedy = Position(place[0]), "copy the table again with 'cdc tables resync'"
            self._tables.findings.append(replace(found, first=first, tables=self._names([relation]), remedy=remedy))

    def _tell_gap(self, gap: Gap, claim: CommitClaim) -> None:
        more = f", and {gap.transactions - 1:,} more" if gap.transactions > 1 else ""
        what = "has no rows before" if gap.damage is DamageKind.HOLE else "has two rows with"
        first, last = Position(gap.first), Position(gap.last)
        found = self._about(claim, gap.damage, f"transaction {first!s} {what} ordinal {gap.ordinal}{more}")
        self._tables.findings.append(replace(found, first=first, last=last, remedy=FOREIGN_WRITER_REMEDY))

    def _damaged(self, claim: CommitClaim, damage: DamageKind, message: str) -> None:
        self._tables.findings.append(self._about(claim, damage, message))

    def _about(self, claim: CommitClaim, damage: DamageKind, message: str) -> AuditFinding:
        """A finding about all of a file."""
        return AuditFinding(
            damage=damage,
            message=message,
            file=claim.path,
            first=claim.first,
            last=claim.last,
            tables=self._names(self._relations(claim)),
            remedy=RESTORE_REMEDY,
        )

    def _called(self, claim: CommitClaim) -> set[str]:
        """The tables that a file may hold rows of, by every name that they ever had."""
        return {topic for relation in self._relations(claim) for topic in self._versions.topics(relation)}

    def _relations(self, claim: CommitClaim) -> Collection[int]:
        if claim.relations is None:
            return ()
        return self._versions.within(claim.relations) or sorted(set(claim.relations))

    def _names(self, relations: Collection[int]) -> tuple[str, ...]:
        return tuple(sorted(self._versions.name(relation) for relation in relations))
