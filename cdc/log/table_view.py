"""View of a Delta table of the log: its files, its `txn` positions, and the metadata of its latest commit.

delta-rs opens the table and lists its files. On a disk this module reads the later commits, one JSON file each.
delta-rs needs 20 ms of CPU to read a commit and to return the same values again, and the capture reader commits up to
sixteen times a second. In an object store delta-rs also reads the later commits, because it requests several at once.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from cdc.bucket_files import BucketPath, Root
from cdc.delta_protocol.actions import decode_commit
from cdc.delta_protocol.checkpoints import last_checkpoint
from cdc.delta_protocol.commits import commit_file
from cdc.errors import LogCorrupt
from cdc.log.disk_format import LogFile, log_file_of_action, log_file_of_add
from cdc.log.table_io import add_actions, last_commit_info, open_table, transaction_version, update_table

REOPEN_AFTER: Final = 64
"""Number of new versions after which delta-rs opens a table again, instead of reading the new commits.

An open DeltaTable keeps in memory every commit that it has read since it was opened.
"""


class LogTableView:
    """One version of a Delta table of the log; `advance` moves it to the newest version."""

    def __init__(self, path: Root) -> None:
        """Open the table at its newest version; raises the errors of `open_table`."""
        self._path = path
        self._known: dict[str, LogFile] = {}
        self._files: list[LogFile] | None = None
        self._open()
        metadata = self._table.metadata()
        self.id, self.description = str(metadata.id), str(metadata.description)

    def _open(self) -> None:
        self._table = open_table(self._path)  # on a disk, `advance` changes `version` but not `_table`
        self.version = self._opened_at = int(self._table.version())
        self._is_listed, self._files = False, None
        self._transactions: dict[str, int | None] = {}
        self._last_commit: dict[str, Any] | None = None

    def advance(self) -> None:
        """Move to the newest version of the table. Raises LogCorrupt for a commit that cannot be read."""
        if isinstance(self._path, BucketPath):
            self._advance_with_delta_rs()
            return
        try:
            while self._advance_by_one():
                pass
        except OSError as exc:
            raise LogCorrupt(f"table {self._path.name!r} of the log cannot be read: {exc}") from exc

    def _advance_by_one(self) -> bool:
        """Move to the next version, or to the last checkpoint if that commit was removed; return False at the end."""
        commit = commit_file(self._path, self.version + 1)
        try:
            self._apply(commit.read_bytes())
        except FileNotFoundError:
            if last_checkpoint(self._path) <= self.version:
                return False
            if not commit.exists():  # log clean-up removed it
                self._open()
        return True

    def files(self) -> list[LogFile]:
        """Return all data files of this version."""
        if not self._is_listed:
            actions = self.listing()
            paths = actions["path"].to_pylist()
            unknown = [index for index, path in enumerate(paths) if path not in self._known]
            rows = actions.take(pa.array(unknown, pa.int64())).to_pylist()
            known = self._known | {row["path"]: log_file_of_action(self._path, row) for row in rows}
            self._known, self._is_listed = {path: known[path] for path in paths}, True
        if self._files is None:
            self._files = list(self._known.values())
        return self._files

    def listing(self) -> pa.Table:
        """Return one row per data file of this version, with the columns of delta-rs' list of add actions."""
        if self._table.version() < self.version < self._opened_at + REOPEN_AFTER:
            update_table(self._path, self._table)
        if self._table.version() != self.version:
            self._reopen()
        return add_actions(self._path, self._table)

    def transaction(self, app_id: str) -> int | None:
        """Return the version of the `txn` of an application id; None if the table has no such `txn`."""
        if app_id not in self._transactions:
            self._transactions[app_id] = transaction_version(self._path, self._not_later(), app_id)
        return self._transactions[app_id]

    def last_commit(self) -> dict[str, Any]:
        """Return the metadata of the commit that created this version."""
        if self._last_commit is None:
            self._last_commit = last_commit_info(self._path, self._not_later())
        return self._last_commit

    def _not_later(self) -> DeltaTable:
        """Return the DeltaTable; open it again if a copy of this view has moved it to a later version."""
        if self._table.version() > self.version:
            self._reopen()
        return self._table

    def _reopen(self) -> None:
        self._table, self._opened_at = open_table(self._path, self.version), self.version

    def _advance_with_delta_rs(self) -> None:
        update_table(self._path, self._table)
        if self._table.version() - self._opened_at >= REOPEN_AFTER:
            self._table = open_table(self._path)
            self._opened_at = int(self._table.version())
        if self._table.version() != self.version:
            self.version, self._is_listed, self._files = int(self._table.version()), False, None
            self._transactions, self._last_commit = {}, None

    def _apply(self, content: bytes) -> None:
        """Move to the next version, whose commit file has this content."""
        try:
            actions = decode_commit(content)
            added = [log_file_of_add(self._path, action["add"]) for action in actions if "add" in action]
            removed = {action["remove"]["path"] for action in actions if "remove" in action}
            marks = [action["txn"] for action in actions if "txn" in action]
            positions: dict[str, int | None] = {mark["appId"]: int(mark["version"]) for mark in marks}
        except (ValueError, KeyError, TypeError) as exc:
            raise LogCorrupt(
                f"commit {self.version + 1} of table {self._path.name!r} of the log cannot be read: "
                f"{type(exc).__name__}: {exc}"
            ) from exc
        self.version += 1
        self._transactions = self._transactions | positions
        self._last_commit = next((action["commitInfo"] for action in actions if "commitInfo" in action), {})
        if self._is_listed and (added or removed):
            kept = {path: file for path, file in self._known.items() if path not in removed}
            prefix = f"{self._path}/"
            self._known, self._files = kept | {file.path.removeprefix(prefix): file for file in added}, None
