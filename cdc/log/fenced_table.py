"""A Delta table of the log with a single writer; each commit fences all other writers.

**Fencing.** A commit carries a Delta `txn` action with the position at which the table then ends. A writer commits only
on top of the version that it wrote itself or resumed from. delta-rs refuses the commit if another commit with the same
application id came in between. A writer that another one overtook therefore cannot add a row, on any store that creates
files atomically.

**Torn commits.** delta-rs makes a commit visible, and the writer syncs it afterwards, before anything depends on it.
After a power loss the newest commit may therefore be incomplete. Such a torn commit was never confirmed, and its
changes are written again. The next writer replaces it by an empty commit. The version number stays in use: a reader
that has read the empty commit would never read another commit with that number.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import structlog
from deltalake import DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import (
    AddAction,
    CommitProperties,
    PostCommitHookProperties,
    RemoveAction,
    Transaction,
)

from cdc import atomic_file
from cdc.change import LOG_SCHEMA
from cdc.errors import LogCorrupt, LogFenced, LogFormatUnknown, LogUnwritable
from cdc.log.checkpoint import checkpoint
from cdc.log.layout import FORMAT, PROPERTIES, TABLE_SCHEMA, LogIdentity, commit_file, format_of, segment_of
from cdc.log.object_path import BucketPath, Root, options_of, storage_errors
from cdc.log.storage import footer, is_table, last_commit_info, open_table
from cdc.private_files import make_private_directory

CHECKPOINT_EVERY: Final = 20
"""Commits between two checkpoints; each commit that an open table has replayed makes the next one slightly slower."""
TOKEN: Final = "cdc.commit"  # noqa: S105 - no secret
"""Key of a unique token in each commit's metadata, which identifies a commit whose response was lost."""
_DELTA_SCHEMA: Final = Schema.from_arrow(TABLE_SCHEMA)
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_PARTITION: Final = "segment"
log = structlog.get_logger("log")


class FencedTable:
    """A table at the last commit that this process made or resumed from; for one thread of one process."""

    def __init__(self, path: Root, log_id: str | None = None) -> None:
        """Open the table; `log_id` is the application id of its commits, by default the table's own id.

        Raises LogUnwritable if the latest commit cannot be made durable. Raises LogFormatUnknown if the log has another
        format than this version writes.
        """
        self.path = path
        self._table = open_table(path)
        metadata = self._table.metadata()
        self.identity = LogIdentity.from_description(metadata.description)
        check_writable_format(format_of(metadata.description))
        self.log_id = log_id or str(metadata.id)
        self._position = self._table.transaction_version(self.log_id)
        self._version = self._table.version()
        self._since_checkpoint = self._version - self._last_checkpoint()
        self._token: str | None = self.latest_commit_info().get(TOKEN)
        self._attempted = self._token
        # the previous writer may have been killed before it synced the latest commit, or its sync failed
        self._rewrite_latest_commit()

    @staticmethod
    def create(path: Root, identity: LogIdentity) -> None:
        """Create an empty table at path if there is none; the table gets the directory's name.

        Raises LogUnwritable if the directory cannot be created.
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
        """The snapshot on which the next commit is based; callers must not refresh it."""
        return self._table

    @property
    def position(self) -> int | None:
        """The position of the last `txn`; None before the first."""
        return self._position

    @property
    def tokens(self) -> frozenset[str | None]:
        """TOKEN of the current commit, and of the last attempted one."""
        return frozenset({self._token, self._attempted})

    def latest_commit_info(self) -> dict[str, Any]:
        """The metadata of the latest commit."""
        return last_commit_info(self.path, self._table)

    def files(self) -> pa.Table:
        """The data files as delta-rs lists them; each statistic is a column."""
        return pa.table(self._table.get_add_actions(flatten=True))

    def check_ours(self) -> None:
        """Raise LogFenced if the snapshot is not the version that this writer wrote or resumed from."""
        # transaction_version costs half as much as a commit; it is not needed for the version that this writer wrote
        if self._table.version() != self._version and self._table.transaction_version(self.log_id) != self._position:
            raise self._fenced_error()

    def check_latest(self) -> None:
        """Open the table again, and raise LogFenced if another writer has committed."""
        if open_table(self.path).version() != self._version:
            raise self._fenced_error()

    def commit(
        self,
        actions: Sequence[AddAction | RemoveAction],
        position: int,
        metadata: Mapping[str, str],
        other_transactions: Mapping[str, int] | None = None,
    ) -> None:
        """Commit actions with position as the `txn`; other_transactions: further application ids → versions.

        The commit is durable when the method returns. Raises LogFenced if another writer has committed. Raises
        LogUnreachable if an object store did not report whether the commit succeeded; compare its TOKEN then.
        """
        self.check_ours()
        transactions = {self.log_id: position, **(other_transactions or {})}
        fields = {TOKEN: uuid.uuid4().hex, **metadata}
        properties = CommitProperties(
            custom_metadata=fields,
            max_commit_retries=1,
            app_transactions=[Transaction(name, int(version)) for name, version in transactions.items()],
        )
        self._attempted = fields[TOKEN]
        with storage_errors(self.path):
            self._create(actions, properties, fields[TOKEN])
            self._token = fields[TOKEN]
            self._version = self._table.version() + 1
            self._table.update_incremental()
            # Log clean-up may have freed this version's file name: then other writers are ahead,
            # and no reader sees this commit
            if self._table.version() != self._version:
                raise self._fenced_error()
            sync_commit(self.path, self._version)
            self._position = int(position)
            self._checkpoint_if_due()

    def added(self, relative: str, size: int, rows: int, statistics: str) -> AddAction:
        """Return the action that adds a file of the table's directory; raises LogCorrupt unless the file is as
        described.
        """
        # delta-rs accepts missing files and files with other columns, so the file is checked first
        path = self.path / relative
        try:
            found = footer(path, size)
            intact = found.num_rows == rows and path.stat().st_size == size
        except (OSError, pa.ArrowException) as exc:
            raise LogCorrupt(f"file {relative!r}, which this process wrote to the log, cannot be read") from exc
        if not intact or found.schema.to_arrow_schema().names != LOG_SCHEMA.names:
            raise LogCorrupt(f"file {relative!r} of the log differs from the bytes that this process wrote")
        partition: dict[str, str | None] = {_PARTITION: str(segment_of(relative))}
        return AddAction(relative, size, partition, _now(), True, statistics)

    @staticmethod
    def removed(relative: str, size: int, *, data_change: bool = True) -> RemoveAction:
        """Return the action that removes a file from the table; the file stays on disk.

        data_change: False if its rows stay in the table.
        """
        return RemoveAction(relative, data_change, _now(), size, {_PARTITION: str(segment_of(relative))})

    def _create(self, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties, token: str) -> None:
        """Send the one request that creates the commit; it may succeed even if it reports an error."""
        try:
            self._table.create_write_transaction(
                list(actions),
                "append",
                _DELTA_SCHEMA,
                partition_by=[_PARTITION],
                commit_properties=properties,
                post_commithook_properties=_NO_HOOKS,
            )
        except (DeltaError, OSError) as exc:
            # the response was lost, or a retried request found the commit of the first attempt
            if isinstance(self.path, BucketPath) and self._has_token(token):
                return
            if isinstance(exc, CommitFailedError):
                raise self._fenced_error() from exc
            if not isinstance(exc, DeltaError) or open_table(self.path).version() == self._table.version():
                raise
            # log clean-up has removed the commits that would show the conflict
            raise self._fenced_error() from exc

    def _has_token(self, token: str) -> bool:
        """Whether the commit after the snapshot has this token."""
        try:
            commit = commit_file(self.path, self._table.version() + 1).read_bytes()
        except FileNotFoundError:
            return False
        return any(
            json.loads(action).get("commitInfo", {}).get(TOKEN) == token for action in commit.splitlines() if action
        )

    def _fenced_error(self) -> LogFenced:
        after = "its creation" if self._position is None else str(self._position)
        return LogFenced(f"another writer committed to {self.path.name!r} of the log after {after}")

    def _rewrite_latest_commit(self) -> None:
        """Write the latest commit to a new file, so that everything readers can see of the log is durable.

        A second fsync of the same file would prove nothing: after a failed one the kernel may mark its pages as clean.
        """
        if isinstance(self.path, BucketPath):  # an object store makes a commit durable before it is visible
            return
        commit = commit_file(self.path, self._table.version())
        try:
            atomic_file.replace(commit, commit.read_bytes())
            atomic_file.sync(self.path)
            atomic_file.sync(self.path.parent)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"the log's latest commit cannot be synced to disk: {reason.lower()}") from exc

    def _last_checkpoint(self) -> int:
        """Version of the last checkpoint, so that writers of only a few commits each still checkpoint in time."""
        try:
            return int(json.loads((self.path / "_delta_log" / "_last_checkpoint").read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _checkpoint_if_due(self) -> None:
        self._since_checkpoint += 1
        if self._since_checkpoint < CHECKPOINT_EVERY:
            return
        self._since_checkpoint = 0
        checkpoint(self.path, self._table)
        # an open table keeps every commit that it has replayed in memory; a newly opened one starts at the checkpoint
        self._table = open_table(self.path)


def check_writable_format(found: int) -> None:
    """Raise LogFormatUnknown unless this version writes logs of that format."""
    if found != FORMAT:
        raise LogFormatUnknown(
            f"the log has format {found}, but this version of cdc writes only format {FORMAT}",
            remedy="stop the reader, run 'cdc migrate log -c FILE', and start the reader again",
        )


def sync_commit(table: Root, version: int) -> None:
    """Sync a commit of the table at that path, which readers can see a moment before its writer has synced it.

    Raises FileNotFoundError if the commit was cleaned up; a commit is synced long before that.
    """
    commit = commit_file(table, version)
    atomic_file.sync(commit)
    atomic_file.sync(commit.parent)


def repair_torn_commit(path: Root) -> None:
    """Replace a torn newest commit by an empty one; a torn first commit is removed.

    Only for the writer of the table. A commit in progress is never visible in part.
    """
    if isinstance(path, BucketPath) or not (numbers := _versions(path)):
        return
    newest = commit_file(path, max(numbers))
    if _actions(newest):
        return
    log.warning("replaced an incomplete, unconfirmed commit of the log with an empty commit", commit=str(newest))
    if before := _actions(commit_file(path, max(numbers) - 1)) if max(numbers) else None:
        atomic_file.replace(newest, next(action for action in before if b'"commitInfo"' in action) + b"\n")
    elif not max(numbers):
        newest.unlink()


def _now() -> int:
    return int(time.time() * 1000)


def _versions(path: Path) -> list[int]:
    names = [commit.stem for commit in (path / "_delta_log").glob("[0-9]*.json")]
    return [int(name) for name in names if name.isdecimal()]


def _actions(commit: Path) -> list[bytes]:
    """The actions of a commit; empty if the file is missing or incomplete."""
    with suppress(FileNotFoundError, ValueError):
        actions = [line for line in commit.read_bytes().splitlines() if line]
        return actions if all(isinstance(json.loads(action), dict) for action in actions) else []
    return []
