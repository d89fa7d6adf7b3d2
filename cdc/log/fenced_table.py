"""A Delta table of the log with a single writer; each commit fences all other writers.

**Fencing.** A commit creates the file of the version after the one that this writer wrote last, or from which it
resumed. The storage creates a file atomically, and only if it does not exist. So after another writer has committed,
this writer can add nothing. Log clean-up may have removed the file of the other writer's commit. Then the commit before
it was removed too, or a later checkpoint exists, and the writer looks for both. A commit also has a Delta `txn` action
with the position at which the table then ends.

FencedTable writes its commits without delta-rs, which needs 15 ms of CPU for a commit. The capture reader commits up to
sixteen times a second. delta-rs creates the table and reads the commits.

**Torn commits.** On a disk this module syncs the content of a commit before the commit is visible, and its directory
afterwards. Commits of delta-rs and of earlier versions of cdc become visible before they are synced. After a power loss
the newest of those commits may be incomplete. Such a torn commit was never confirmed,
and its changes are written again. The next writer replaces the torn commit by an empty one, and does not remove it. If
it were removed, the next commit would get its version number. A reader that has already read this version would then
never read that commit.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog
from deltalake import DeltaTable, Schema

from cdc import atomic_file
from cdc.bucket_files import BucketPath, Root, options_of, storage_errors
from cdc.delta_protocol.actions import (
    Action,
    add_action,
    commit_info,
    decode_commit,
    remove_action,
    txn_action,
)
from cdc.delta_protocol.checkpoints import checkpoint, checkpoint_in_bucket, last_checkpoint
from cdc.delta_protocol.commits import commit_file, create_commit, replace_commit, rewrite_commit
from cdc.errors import LogCorrupt, LogFenced, LogFormatUnknown, LogUnwritable
from cdc.failpoint import hit
from cdc.file_modes import make_private_directory
from cdc.log.disk_format import FORMAT, PROPERTIES, TABLE_SCHEMA, LogIdentity, format_of, segment_of
from cdc.log.table_io import (
    add_actions,
    footer,
    is_table,
    last_commit_info,
    open_table,
    transaction_version,
    update_table,
)
from cdc.log_row import LOG_SCHEMA

CHECKPOINT_EVERY: Final = 50
"""Number of commits between two checkpoints.

A process that opens the table needs 0.7 ms for each commit after the last checkpoint.
"""
REOPEN_AFTER: Final = 10
"""Number of own commits after which delta-rs opens the table again, instead of reading the new commits.

delta-rs needs 20 ms to read a commit. An open DeltaTable also keeps in memory every commit that it has read, so it is
opened again after CHECKPOINT_EVERY commits in any case.
"""
TOKEN: Final = "cdc.commit"  # noqa: S105 - no secret
"""Key in the metadata of each commit. Its value is a unique token.

If the storage's response to a commit was lost, the token in the commit file shows which writer made the commit.
"""
_DELTA_SCHEMA: Final = Schema.from_arrow(TABLE_SCHEMA)
_WRITER_VERSION: Final = 2
"""Highest Delta writer version that this module supports; a table with a higher one may demand more of its writers."""
_PARTITION: Final = "segment"
_PARAMETERS: Final = {"mode": "Append", "partitionBy": json.dumps([_PARTITION])}
log = structlog.get_logger("log")


class FencedTable:
    """Writer of one Delta table of the log, for one thread of one process.

    Its snapshot of the table is the version that this writer wrote last, or from which it resumed.
    """

    def __init__(self, path: Root, log_id: str | None = None) -> None:
        """Open the table at `path`, and make its latest commit durable.

        `log_id` is the application id of the writer's `txn` actions; by default it is the table's own Delta id. Raises
        LogUnwritable if the latest commit cannot be made durable. Raises LogFormatUnknown if the log has another format
        than the one that this version of cdc writes, or if a table requires a higher Delta writer version.
        """
        self.path = path
        self._table = open_table(path)
        metadata = self._table.metadata()
        self.identity = LogIdentity.from_description(metadata.description)
        check_writable_format(format_of(metadata.description))
        _check_protocol(path, self._table)
        self.log_id = log_id or str(metadata.id)
        self._position = transaction_version(path, self._table, self.log_id)
        self._version = self._table.version()
        self._opened_at = self._version
        self._since_checkpoint = self._version - last_checkpoint(path)
        self._token: str | None = self.latest_commit_info().get(TOKEN)
        self._attempted = self._token
        # the previous writer may have been killed before it synced the directory, or its sync failed
        self._rewrite_latest_commit()

    @staticmethod
    def create(path: Root, identity: LogIdentity) -> None:
        """Create an empty table at `path` unless a table exists; the directory's name becomes the table's name.

        The method first repairs a torn commit of an existing table. Raises LogUnwritable if the directory cannot be
        created, HardLinksUnsupported if its file system makes no hard links.
        """
        repair_torn_commit(path)
        if is_table(path):
            return
        try:
            if isinstance(path, BucketPath):
                path.mkdir(parents=True, exist_ok=True)
            else:
                make_private_directory(path.parent)  # the log's root
                make_private_directory(path)
                atomic_file.probe_links(path)
        except OSError as exc:
            why = (exc.strerror or "refused").lower()
            raise LogUnwritable(f"the log's directory {str(path)!r} cannot be created: {why}") from exc
        with storage_errors(path):
            DeltaTable.create(
                str(path),
                _DELTA_SCHEMA,
                mode="ignore",
                partition_by=[_PARTITION],
                name=path.name,
                description=identity.to_description(),
                configuration=dict(PROPERTIES),
                storage_options=options_of(path),
            )

    @property
    def table(self) -> DeltaTable:
        """The table at the version that this writer wrote last or resumed from; callers must not refresh it.

        delta-rs first reads the commits of this writer that it has not read. Raises LogFenced if it then finds a commit
        of another writer; only `check_latest` always looks for one.
        """
        behind = self._version - self._table.version()
        if behind > REOPEN_AFTER or (behind and self._version - self._opened_at > CHECKPOINT_EVERY):
            self._table = open_table(self.path)
            self._opened_at = self._table.version()
        elif behind:
            update_table(self.path, self._table)
        if self._table.version() != self._version:
            raise self._fenced_error()
        return self._table

    @property
    def next_version(self) -> int:
        """The version of the table that the next commit of this writer creates."""
        return self._version + 1

    @property
    def position(self) -> int | None:
        """Position at which the table ends, from its last `txn` action; None before the first `txn`."""
        return self._position

    @property
    def tokens(self) -> frozenset[str | None]:
        """The values of TOKEN in the last successful commit and in the last attempted commit of this writer."""
        return frozenset({self._token, self._attempted})

    def latest_commit_info(self) -> dict[str, Any]:
        """Return the metadata of the latest commit of this writer, or of the one from which it resumed."""
        return last_commit_info(self.path, self.table)

    def files(self) -> pa.Table:
        """Return one row per data file of the table, with the columns of delta-rs' flattened list of add actions."""
        return add_actions(self.path, self.table)

    def check_latest(self) -> None:
        """Open the table again, and raise LogFenced if another writer has committed."""
        if open_table(self.path).version() != self._version:
            raise self._fenced_error()

    def commit(
        self,
        actions: Sequence[Action],
        position: int,
        metadata: Mapping[str, str],
        other_transactions: Mapping[str, int] | None = None,
    ) -> None:
        """Commit `add` and `remove` actions, with `position` as the version of the table's `txn`.

        `other_transactions` maps further application ids to versions. The commit is durable when the method returns.
        Raises LogFenced if another writer has committed. After LogUnreachable or OSError the commit may exist
        nevertheless; the caller then compares the token in the latest commit with `tokens`.
        """
        fields = {TOKEN: uuid.uuid4().hex, **metadata}
        transactions = {self.log_id: position, **(other_transactions or {})}
        written = [
            commit_info("WRITE", operationParameters=_PARAMETERS, engineInfo="cdc", **fields),
            *(txn_action(name, version) for name, version in transactions.items()),
            *actions,
        ]
        self._attempted = fields[TOKEN]
        self._create(written, fields[TOKEN])
        self._token, self._version, self._position = fields[TOKEN], self.next_version, int(position)
        self._checkpoint_if_due()

    def added(self, relative: str, size: int, rows: int, statistics: str, *, data_change: bool = True) -> Action:
        """Return the action that adds a file, given by its path relative to the table's directory.

        Pass `data_change=False` if the same commit removes the files that contained the rows before. Raises LogCorrupt
        if the file does not have the given size, the given number of rows, and the columns of LOG_SCHEMA.
        """
        path = self.path / relative
        try:
            found = footer(path, size)
            intact = found.num_rows == rows and path.stat().st_size == size
        except (OSError, pa.ArrowException) as exc:
            raise LogCorrupt(f"file {relative!r}, which this process wrote to the log, cannot be read") from exc
        if not intact or found.schema.to_arrow_schema().names != LOG_SCHEMA.names:
            raise LogCorrupt(f"file {relative!r} of the log differs from the bytes that this process wrote")
        return {"add": add_action(relative, size, statistics, _partition(relative), data_change=data_change)}

    @staticmethod
    def removed(relative: str, size: int, *, data_change: bool = True) -> Action:
        """Return the action that removes a file from the table; the file stays on disk.

        Pass `data_change=False` if other files of the same commit contain the rows of the file.
        """
        return {"remove": remove_action(relative, size, _partition(relative), data_change=data_change)}

    def _create(self, actions: Sequence[Action], token: str) -> None:
        """Create the next commit. After LogUnreachable or OSError the commit may exist nevertheless."""
        hit(f"before_commit_of_{self.path.name}")
        commit = commit_file(self.path, self.next_version)
        try:
            self._create_once(commit, actions)
        except FileExistsError as exc:
            if _token_in(commit) != token:  # a repeated request finds the commit that the first request created
                raise self._fenced_error() from exc
        if self._is_overtaken():
            raise self._fenced_error()

    def _create_once(self, commit: Root, actions: Sequence[Action]) -> None:
        """Create the next commit durably, in this file; raises FileExistsError if it exists."""

        def create(path: str, content: bytes) -> None:
            atomic_file.create(self.path / path, content)

        try:
            create_commit(create, self.next_version, actions)
        except FileExistsError:
            if _token_in(commit) is not None:
                raise
            create_commit(create, self.next_version, actions)  # the store refused a missing file without a reason

    def _is_overtaken(self) -> bool:
        """Return whether log clean-up had removed another writer's commit before this writer created the same version.

        Then no reader that opens the table sees the commit of this writer.
        """
        if not isinstance(self.path, BucketPath) and not commit_file(self.path, self._version).exists():
            # clean-up removes the oldest commit first; an open reader at the earlier version must not read this commit
            commit_file(self.path, self.next_version).unlink(missing_ok=True)
            return True
        return last_checkpoint(self.path) > self.next_version

    def _fenced_error(self) -> LogFenced:
        after = "none" if self._position is None else str(self._position)
        return LogFenced(
            f"another writer committed to table {self.path.name!r} of the log; last position of this writer: {after}"
        )

    def _rewrite_latest_commit(self) -> None:
        """Write the latest commit to a new file and sync it, so that everything readers can see is durable."""
        if isinstance(self.path, BucketPath):  # an object store makes a commit durable before it is visible
            return
        try:
            rewrite_commit(self.path, self._table.version())
            atomic_file.sync(self.path)
            atomic_file.sync(self.path.parent)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"the log's latest commit cannot be synced to disk: {reason.lower()}") from exc

    def _checkpoint_if_due(self) -> None:
        self._since_checkpoint += 1
        if self._since_checkpoint < CHECKPOINT_EVERY:
            return
        self._since_checkpoint = 0
        if isinstance(self.path, BucketPath):
            with storage_errors(self.path):
                checkpoint_in_bucket(self.table)
            return
        try:
            checkpoint(self.path, self._version)
        except FileNotFoundError as exc:  # only another writer removes commits before this checkpoint
            raise self._fenced_error() from exc


def check_writable_format(found: int) -> None:
    """Raise LogFormatUnknown unless `found` is the format that this version of cdc writes."""
    if found != FORMAT:
        raise LogFormatUnknown(
            f"the log has format {found}, but this version of cdc writes only format {FORMAT}",
            remedy="stop the reader, run 'cdc migrate log -c FILE', and start the reader again",
        )


def _check_protocol(path: Root, table: DeltaTable) -> None:
    """Raise LogFormatUnknown if the table requires a higher Delta writer version than this module supports."""
    found = table.protocol().min_writer_version
    if found > _WRITER_VERSION:
        raise LogFormatUnknown(
            f"another client changed table {path.name!r} of the log: it requires Delta writer version {found}, but cdc "
            f"supports only version {_WRITER_VERSION}",
            remedy="stop the other client; run 'cdc slots drop -c FILE', set a new log.path and new sink paths, then "
            "start the reader, which copies every table again",
        )


def sync_commit(table: Root, version: int) -> None:
    """Sync to disk the commit that created `version` of the table at the path `table`.

    On a disk a commit is visible before its directory is synced. So a process that depends on another writer's commit
    first syncs the commit itself. Raises FileNotFoundError if log clean-up has removed the commit; its writer synced it
    long before.
    """
    commit = commit_file(table, version)
    atomic_file.sync(commit)
    atomic_file.sync(commit.parent)


def repair_torn_commit(path: Root) -> None:
    """Replace the newest commit of the table by an empty commit if a power loss left it incomplete.

    An incomplete first commit is removed. Only the writer of the table may call this function. A visible commit is
    never half-written by a running process, because commits become visible atomically.
    """
    if isinstance(path, BucketPath) or not (numbers := _versions(path)):
        return
    newest = commit_file(path, max(numbers))
    if _actions(newest):
        return
    log.warning(
        "discarding the newest commit of the log, because a power loss left it incomplete; its rows are written again",
        commit=str(newest),
    )
    if before := _actions(commit_file(path, max(numbers) - 1)) if max(numbers) else None:
        replace_commit(path, max(numbers), [next(action for action in before if "commitInfo" in action)])
    elif not max(numbers):
        newest.unlink()


def _token_in(commit: Root) -> str | None:
    """Return the value of TOKEN in a commit file, "" for a commit without it; None if the file does not exist."""
    try:
        actions = decode_commit(commit.read_bytes())
    except FileNotFoundError:
        return None
    return next((action["commitInfo"].get(TOKEN, "") for action in actions if "commitInfo" in action), "")


def _partition(relative: str) -> dict[str, str | None]:
    return {_PARTITION: str(segment_of(relative))}


def _versions(path: Path) -> list[int]:
    names = [commit.stem for commit in (path / "_delta_log").glob("[0-9]*.json")]
    return [int(name) for name in names if name.isdecimal()]


def _actions(commit: Path) -> list[Action]:
    """Return the actions of a commit file; empty if the file is missing or incomplete."""
    with suppress(FileNotFoundError, ValueError):
        return decode_commit(commit.read_bytes())
    return []
