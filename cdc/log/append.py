"""LogWriter: the only writer of `changes`; the commit is the fence.

A commit carries a Delta `txn` action whose version is the log's last position. The writer commits only from a
table snapshot whose version is the one it wrote itself or resumed from; delta-rs refuses a commit when another
one with the same application id came in between. So a reader that was stopped while another took over cannot add
a row, on any store that creates a file atomically.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction, CommitProperties, PostCommitHookProperties, Transaction

from cdc import durable
from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import LogCorrupt, LogFenced, LogUnwritable
from cdc.log.layout import CHANGES, PROPERTIES, TABLE_SCHEMA, CommitInfo, LogIdentity, statistics
from cdc.log.segments import Segment, SegmentLimits
from cdc.position import Position

CHECKPOINT_EVERY: Final = 40
"""Commits between checkpoints: each one that a table has replayed makes the next a little dearer."""

_DELTA_SCHEMA: Final = Schema.from_arrow(TABLE_SCHEMA)
_ORDER: Final = [("relation", "ascending"), ("position", "ascending"), ("ordinal", "ascending")]
_DICTIONARIES: Final = ["relation", "topic", "op", "xid", "partial", "committed_at"]
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)


@dataclass(frozen=True, slots=True)
class StagedFile:
    """A data file that is written and synced, and not yet part of the log."""

    path: Path
    relative: str
    segment: int
    rows: int
    size: int
    statistics: str


class LogWriter:
    """Appends to one log; one process, one thread."""

    def __init__(self, root: Path, limits: SegmentLimits) -> None:
        """Raises LogUnwritable if what the log holds cannot be made durable."""
        self._root = root / CHANGES
        self._limits = limits
        self._table = DeltaTable(str(self._root))
        self.identity = LogIdentity.from_description(self._table.metadata().description)
        self.log_id = str(self._table.metadata().id)
        self._written = self._table.transaction_version(self.log_id)
        self._ours = self._table.version()
        self._since_checkpoint = 0
        self._segment = Segment(number=self._last_segment(), opened_at=time.monotonic())
        # who wrote the latest commit may have died before it was on the disk, or its sync failed
        self._secure()

    @classmethod
    def open(cls, root: Path, identity: LogIdentity, limits: SegmentLimits) -> Self:
        """The writer of the log under root, which is made if there is none."""
        if not DeltaTable.is_deltatable(str(root / CHANGES)):
            (root / CHANGES).mkdir(parents=True, exist_ok=True)
            DeltaTable.create(
                str(root / CHANGES),
                _DELTA_SCHEMA,
                mode="ignore",
                partition_by=["segment"],
                name=CHANGES,
                description=identity.to_description(),
                configuration=dict(PROPERTIES),
            )
        return cls(root, limits)

    @property
    def durable(self) -> Position | None:
        """The last position in the log; None while it holds no snapshot."""
        return None if self._written is None else Position(self._written)

    @property
    def last_commit(self) -> CommitInfo | None:
        """What the latest commit says of itself."""
        return CommitInfo.from_metadata(self._table.history(1)[0])

    def stage(self, rows: pa.Table) -> list[StagedFile]:
        """Write rows (LOG_SCHEMA) to data files, sorted and synced to disk; nothing is visible yet.

        Schema rows go to a file of their own: readers find them by its statistics.
        """
        rows = rows.cast(LOG_SCHEMA)
        is_schema = pc.equal(rows["op"], Operation.SCHEMA.value)
        if not pc.any(is_schema).as_py():
            return [self._write(rows)] if rows.num_rows else []
        parts = (rows.filter(is_schema), rows.filter(pc.invert(is_schema)))
        return [self._write(part) for part in parts if part.num_rows]

    def commit(self, files: Sequence[StagedFile], info: CommitInfo) -> None:
        """Make files part of the log in one commit that ends at info.last; durable when it returns.

        Raises LogFenced if another writer committed, LogCorrupt if a file is not as it was written.
        """
        if self.durable is not None and info.last <= self.durable:
            raise LogFenced(
                f"position would not advance: the log is at {self.durable!s}, the commit ends at {info.last!s}"
            )
        if not self._is_ours():
            raise LogFenced(f"another writer committed to the log after {self.durable!s}")
        actions = [self._checked(file) for file in files]
        try:
            self._table.create_write_transaction(
                actions,
                "append",
                _DELTA_SCHEMA,
                partition_by=["segment"],
                commit_properties=CommitProperties(
                    custom_metadata=info.to_metadata(),
                    max_commit_retries=1,
                    app_transactions=[Transaction(self.log_id, int(info.last))],
                ),
                post_commithook_properties=_NO_HOOKS,
            )
        except CommitFailedError as exc:
            raise LogFenced(f"another writer committed to the log after {self.durable!s}") from exc
        self._ours = self._table.version() + 1
        self._table.update_incremental()
        self._sync_commit()
        self._written = int(info.last)
        self._tidy()

    def _secure(self) -> None:
        """Write the latest commit anew, so that what is read of the log is durable too.

        After a failed fsync the kernel may call the same pages clean: a second one of that file would prove nothing.
        """
        commit = self._latest_commit()
        try:
            durable.replace(commit, commit.read_bytes())
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"the log's latest commit cannot be made durable: {reason.lower()}") from exc

    def _is_ours(self) -> bool:
        """Whether the snapshot to commit from is as this writer left or found it."""
        # the version that this writer made carries its own `txn`; asking for it costs as much as half a commit
        return self._table.version() == self._ours or self._table.transaction_version(self.log_id) == self._written

    def _write(self, rows: pa.Table) -> StagedFile:
        if pc.count_distinct(rows["relation"], mode="all").as_py() > 1:
            rows = rows.sort_by(_ORDER)
        self._segment = self._segment.rolled(self._limits, time.monotonic())
        relative = f"segment={self._segment.number}/{uuid.uuid4().hex}.parquet"
        path = self._root / relative
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as sink:
            pq.write_table(rows, sink, compression="lz4", use_dictionary=_DICTIONARIES, row_group_size=131_072)
            sink.flush()
            os.fsync(sink.fileno())
        durable.sync(path.parent)
        size = path.stat().st_size
        self._segment = self._segment.grown(size)
        return StagedFile(path, relative, self._segment.number, rows.num_rows, size, statistics(rows))

    def _checked(self, file: StagedFile) -> AddAction:
        # delta-rs accepts missing and foreign files, so what goes in is looked at first
        try:
            footer = pq.read_metadata(file.path)
            intact = footer.num_rows == file.rows and file.path.stat().st_size == file.size
        except (OSError, pa.ArrowException) as exc:
            raise LogCorrupt(f"staged file {file.relative!r} cannot be read") from exc
        if not intact or footer.schema.to_arrow_schema().names != LOG_SCHEMA.names:
            raise LogCorrupt(f"staged file {file.relative!r} is not as it was written")
        partition: dict[str, str | None] = {"segment": str(file.segment)}
        return AddAction(file.relative, file.size, partition, int(time.time() * 1000), True, file.statistics)

    def _latest_commit(self) -> Path:
        return self._root / "_delta_log" / f"{self._table.version():020d}.json"

    def _sync_commit(self) -> None:
        commit = self._latest_commit()
        durable.sync(commit)
        durable.sync(commit.parent)

    def _tidy(self) -> None:
        self._since_checkpoint += 1
        if self._since_checkpoint < CHECKPOINT_EVERY:
            return
        self._since_checkpoint = 0
        self._table.create_checkpoint()
        self._table.cleanup_metadata()
        # an opened table keeps every commit it has replayed; a fresh one starts at the checkpoint
        self._table = DeltaTable(str(self._root))

    def _last_segment(self) -> int:
        numbers = pa.table(self._table.get_add_actions(flatten=True))["partition.segment"]
        return int(pc.max(numbers).as_py()) + 1 if len(numbers) else 0
