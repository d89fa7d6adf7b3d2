"""Open indexed tables: the targets of one sink that the indexed writer writes, with their open indexes."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Final

import pyarrow as pa
import structlog
from deltalake.exceptions import CommitFailedError

from cdc.delta_protocol.actions import txn_action
from cdc.delta_protocol.table_storage import storage_of
from pipelines.sinks.delta.current_version import IndexedCommit
from pipelines.sinks.delta.damage_errors import reading_files
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.indexed.delta_log import LiveFiles, LogNotReadable
from pipelines.sinks.delta.indexed_writer import IndexedRows, IndexedTable, Indexing, refusal
from pipelines.sinks.delta.merge_source import RowFinder

UNUSED_FOR: Final = 7 * 86_400.0
"""Seconds after which the index of a target is removed from disk, if it was not written meanwhile."""

log = structlog.get_logger("apply")

_Rows = tuple[int | None, str | None]
"""Rows of a target: the relation if several tables share the target, and `IndexedRows.null_column`."""


class IndexedTargets:
    """Opens and keeps the indexed tables of one sink. A thread may use a target only while it has the target's lock."""

    def __init__(self, folder: str | None, indexing: Indexing | None = None) -> None:
        """folder: local directory for the indexes; None: temporary directories."""
        self._folder, self._indexing = None if folder is None else Path(folder), indexing or Indexing()
        self._tables: dict[str, dict[_Rows, IndexedTable]] = {}
        """URI of a target → its open indexed tables."""
        self.refused: dict[str, str] = {}
        """URI of a target → why the indexed writer does not write it."""

    def can_merge(self, target: DeltaTarget, key: tuple[str, ...]) -> bool:
        """Read new commits of other writers; return whether the indexed writer can merge rows by these key columns.

        If it cannot, the reason is recorded in `refused`.
        """
        with reading_files(target.uri):
            reason = self._open(target, key)
        if reason is None:
            self.refused.pop(target.uri, None)
        elif self.refused.get(target.uri) != reason:
            self.refused[target.uri] = reason
            log.info("a target is written without the indexed writer", target=target.uri, reason=reason)
        return reason is None

    def merge(
        self, target: DeltaTarget, source: pa.Table, key: tuple[str, ...], marker: TxnMarker, *, copies: bool = False
    ) -> None:
        """Merge `source` into `target`, after `can_merge` allowed it. Arguments as in Writers.merge.

        copies: as in IndexedTable.merge.
        """
        table, since = self._tables[target.uri][_rows(target)], target.version
        txn, described = txn_action(marker.app_id, marker.version), target.statistics_columns
        with reading_files(target.uri):
            table.read_commits(since)  # since the choice of the writer, rows may have been erased
            if table.key != key or refusal(table.files) is not None:
                raise CommitFailedError("the target changed between the choice of the writer and the merge")
            copied = table.merge(source, txn, target.columns, described, copies=copies)
        target.current.record_own_commit(since, table.files.version, marker.transactions)
        target.current.indexed_commit = IndexedCommit(table.files.version, copied)
        write_due_checkpoint(target, table.files)

    def row_finder(self, target: DeltaTarget, key: tuple[str, ...], null_column: str | None = None) -> RowFinder:
        """Return a function (keys, schema) → rows that calls `find_rows` with the arguments of this method."""
        return partial(self.find_rows, target, key, null_column)

    def find_rows(
        self,
        target: DeltaTarget,
        key: tuple[str, ...],
        null_column: str | None,
        keys: pa.Table,
        schema: pa.Schema,
    ) -> pa.Table | None:
        """Return the rows with the given keys in the newest version of a target; None if no index can be used.

        keys: the values of the key columns `key`. schema: the columns to return. null_column: if set, only rows in
        which this column is null are returned. A separate index contains these rows; merges do not use it.
        """
        with reading_files(target.uri):
            if self._open(target, key, null_column) is not None:
                return None
            table = self._tables[target.uri][_rows(target, null_column)]
            if table.files.version != target.version or not {*schema.names}.isdisjoint(table.files.partition_columns):
                return None
            return table.find_rows(keys, schema)

    def notice(self, uri: str) -> str | None:
        """Return a sentence about a target without a complete key index; None for others. Any thread may ask."""
        if (reason := self.refused.get(uri)) is not None:
            return f"the target is written without the key index: {reason}"
        waiting = sum(table.waiting_files for table in [*self._tables.get(uri, {}).values()])
        if not waiting:
            return None
        return f"the key index is being built: until then each batch reads the keys of {waiting:,} data files"

    def has_open_index(self, target: DeltaTarget) -> bool:
        """Return whether the indexed writer has opened the target and does not refuse it."""
        return _rows(target) in self._of(target) and target.uri not in self.refused

    def data_paths(self, target: DeltaTarget) -> frozenset[str] | None:
        """Return the paths of the live data files of a target; None if no open indexed table is at `target.version`."""
        for table in self.opened(target):
            if table.files.version == target.version:
                return frozenset(file.path for file in table.files.by_path.values())
        return None

    def opened(self, target: DeltaTarget) -> list[IndexedTable]:
        """Return the open indexed tables that merge rows into a target: several if several source tables share it."""
        return [table for (_, column), table in self._of(target).items() if column is None]

    def close(self) -> None:
        """Save and close all indexes."""
        tables, self._tables = self._tables, {}
        for of_target in tables.values():
            for table in of_target.values():
                table.close()
        self._indexing.thread.close()
        if self._folder is not None and self._folder.is_dir():
            _remove_unused(self._folder.iterdir())

    def _open(self, target: DeltaTarget, key: tuple[str, ...], null_column: str | None = None) -> str | None:
        """Open the table or read its new commits; return a reason if the indexed writer cannot write it."""
        wanted, table_id = _rows(target, null_column), target.metadata.id
        known = self._of(target).get(wanted)
        if known is not None and (known.key != key or known.files.metadata.get("id") != str(table_id)):
            self._tables[target.uri].pop(wanted).close()
            known = None
        try:
            if known is None:
                storage = storage_of(target.uri)
                first = target.first_commit
                files = LiveFiles.read(storage) if first is None else LiveFiles.after_first_commit(storage, first)
                if (reason := refusal(files)) is not None:
                    return reason
                rows = IndexedRows(key, target.part.relation, null_column)
                known = IndexedTable(storage, files, self._folder_of(target.uri, rows), rows, self._indexing)
                self._tables.setdefault(target.uri, {})[wanted] = known
            known.read_commits(target.version)
        except LogNotReadable as exc:
            return str(exc)
        return refusal(known.files)

    def _of(self, target: DeltaTarget) -> Mapping[_Rows, IndexedTable]:
        return self._tables.get(target.uri, {})

    def _folder_of(self, uri: str, rows: IndexedRows) -> Path | None:
        if self._folder is None:
            return None
        return self._folder / sha256(repr((uri, rows)).encode()).hexdigest()[:32]


def write_due_checkpoint(target: DeltaTarget, files: LiveFiles) -> None:
    """Write a checkpoint if one is due after a commit of the files."""
    if target.version % CHECKPOINT_EVERY:
        return
    try:
        with reading_files(target.uri):
            files.write_checkpoint()
    except LogNotReadable as exc:
        log.warning("a target gets no checkpoint, so its commits stay", target=target.uri, reason=str(exc))


def _rows(target: DeltaTarget, null_column: str | None = None) -> _Rows:
    return target.part.relation, null_column


def _remove_unused(folders: Iterable[Path]) -> None:
    for folder in folders:
        if folder.stat().st_mtime < time.time() - UNUSED_FOR:
            shutil.rmtree(folder, ignore_errors=True)
