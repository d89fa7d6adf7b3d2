"""A Delta table of the log with a single writer; each commit fences other writers.

A commit carries a Delta `txn` action with the position that the table then ends at. The writer commits only from a
table snapshot whose version is the one it wrote itself or resumed from; delta-rs refuses a commit when another
one with the same application id came in between. So a process that was stopped while another took over cannot add
a row, on any store that creates a file atomically.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
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
from cdc.log import torn_commit
from cdc.log.checkpoint import checkpoint
from cdc.log.layout import FORMAT, PROPERTIES, TABLE_SCHEMA, LogIdentity, commit_file, format_of, segment_of
from cdc.log.object_path import BucketPath, Root, options_of, storage_errors
from cdc.log.storage import footer, is_table, last_commit_info, open_table
from cdc.private_files import make_private_directory

CHECKPOINT_EVERY: Final = 20
"""Commits between checkpoints: each one that a table has replayed makes the next a little dearer."""

TOKEN: Final = "cdc.commit"  # noqa: S105 - no secret
"""Key of a unique token in each commit's metadata, which identifies a commit whose response was lost."""

_DELTA_SCHEMA: Final = Schema.from_arrow(TABLE_SCHEMA)
_NO_HOOKS: Final = PostCommitHookProperties(create_checkpoint=False, cleanup_expired_logs=False)
_PARTITION: Final = "segment"


class FencedTable:
    """A table as of the last commit that this process made or resumed from; one process, one thread."""

    def __init__(self, path: Root, log_id: str | None = None) -> None:
        """log_id: the application id of its commits, None for the table's own id.

        Raises LogUnwritable if what the table holds cannot be made durable, LogFormatUnknown for a log of another
        format than this version writes.
        """
        self.path = path
        self._table = open_table(path)
        metadata = self._table.metadata()
        self.identity = LogIdentity.from_description(metadata.description)
        check_writable_format(format_of(metadata.description))
        self.log_id = log_id or str(metadata.id)
        self._written = self._table.transaction_version(self.log_id)
        self._ours = self._table.version()
        self._since_checkpoint = self._ours - self._checkpoint()
        self._token: str | None = self.said_last().get(TOKEN)
        self._attempted = self._token
        # who wrote the latest commit may have died before it was on the disk, or its sync failed
        self._secure()

    @staticmethod
    def create(path: Root, identity: LogIdentity) -> None:
        """Make an empty table at path if there is none; the directory's name becomes the table's.

        Raises LogUnwritable where no directory can be.
        """
        torn_commit.repair_torn_commit(path)
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
        """The snapshot to commit from; not to be refreshed by others."""
        return self._table

    @property
    def position(self) -> int | None:
        """The version of the last `txn`; None before the first."""
        return self._written

    @property
    def tokens(self) -> frozenset[str | None]:
        """TOKEN of the current commit, and of the last attempted one."""
        return frozenset({self._token, self._attempted})

    def said_last(self) -> dict[str, Any]:
        """What the latest commit says of itself."""
        return last_commit_info(self.path, self._table)

    def files(self) -> pa.Table:
        """The data files as delta-rs lists them, statistics in columns of their own."""
        return pa.table(self._table.get_add_actions(flatten=True))

    def check_ours(self) -> None:
        """Raise LogFenced unless the snapshot is as this writer left or found it."""
        # the version that this writer made carries its own `txn`; asking for it costs as much as half a commit
        if self._table.version() != self._ours and self._table.transaction_version(self.log_id) != self._written:
            raise self._fenced()

    def check_latest(self) -> None:
        """Raise LogFenced if another writer committed since, which the table is asked for anew."""
        if open_table(self.path).version() != self._ours:
            raise self._fenced()

    def commit(
        self,
        actions: Sequence[AddAction | RemoveAction],
        position: int,
        metadata: Mapping[str, str],
        marks: Mapping[str, int] | None = None,
    ) -> None:
        """One commit whose `txn` is position; marks are further transactions, by application id.

        Durable when it returns. Raises LogFenced if another writer committed since; of an object store LogUnreachable
        if it is not known whether the commit was made: its token tells, see TOKEN.
        """
        self.check_ours()
        transactions = {self.log_id: position, **(marks or {})}
        said = {TOKEN: uuid.uuid4().hex, **metadata}
        properties = CommitProperties(
            custom_metadata=said,
            max_commit_retries=1,
            app_transactions=[Transaction(name, int(version)) for name, version in transactions.items()],
        )
        self._attempted = said[TOKEN]
        with storage_errors(self.path):
            self._create(actions, properties, said[TOKEN])
            self._token = said[TOKEN]
            self._ours = self._table.version() + 1
            self._table.update_incremental()
            # a name that clean-up had freed can be taken: then others have long gone on, and nobody will see this one
            if self._table.version() != self._ours:
                raise self._fenced()
            sync_commit(self.path, self._ours)
            self._written = int(position)
            self._tidy()

    def added(self, relative: str, size: int, rows: int, statistics: str) -> AddAction:
        """The action that makes a file of the table's directory part of it; raises LogCorrupt if it is another one."""
        # delta-rs accepts missing and foreign files, so what goes in is looked at first
        path = self.path / relative
        try:
            found = footer(path, size)
            intact = found.num_rows == rows and path.stat().st_size == size
        except (OSError, pa.ArrowException) as exc:
            raise LogCorrupt(f"staged file {relative!r} cannot be read") from exc
        if not intact or found.schema.to_arrow_schema().names != LOG_SCHEMA.names:
            raise LogCorrupt(f"staged file {relative!r} differs from what was written")
        partition: dict[str, str | None] = {_PARTITION: str(segment_of(relative))}
        return AddAction(relative, size, partition, _now(), True, statistics)

    @staticmethod
    def removed(relative: str, size: int, *, data_change: bool = True) -> RemoveAction:
        """The action that takes a file out of the table; it stays on the disk.

        data_change: False if its rows stay in the table.
        """
        return RemoveAction(relative, data_change, _now(), size, {_PARTITION: str(segment_of(relative))})

    def _create(self, actions: Sequence[AddAction | RemoveAction], properties: CommitProperties, token: str) -> None:
        """The one request that makes the commit or does not; an error of it may hide that it was made."""
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
            # the answer was lost, or a second try has met the first one
            if isinstance(self.path, BucketPath) and self._made(token):
                return
            if isinstance(exc, CommitFailedError):
                raise self._fenced() from exc
            if not isinstance(exc, DeltaError) or open_table(self.path).version() == self._table.version():
                raise
            # log clean-up has taken the commits away that would show the conflict
            raise self._fenced() from exc

    def _made(self, token: str) -> bool:
        """Whether the commit behind the snapshot is the one with the token."""
        try:
            commit = commit_file(self.path, self._table.version() + 1).read_bytes()
        except FileNotFoundError:
            return False
        return any(
            json.loads(action).get("commitInfo", {}).get(TOKEN) == token for action in commit.splitlines() if action
        )

    def _fenced(self) -> LogFenced:
        after = "its creation" if self._written is None else str(self._written)
        return LogFenced(f"another writer committed to {self.path.name!r} of the log after {after}")

    def _secure(self) -> None:
        """Write the latest commit anew, so that what is read of the log is durable too.

        After a failed fsync the kernel may call the same pages clean: a second one of that file would prove nothing.
        """
        if isinstance(self.path, BucketPath):  # what it shows is durable
            return
        commit = commit_file(self.path, self._table.version())
        try:
            atomic_file.replace(commit, commit.read_bytes())
            atomic_file.sync(self.path)
            atomic_file.sync(self.path.parent)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise LogUnwritable(f"the log's latest commit cannot be made durable: {reason.lower()}") from exc

    def _checkpoint(self) -> int:
        """Version of the last checkpoint: a writer that lives for a few commits must make the next one in its turn."""
        try:
            return int(json.loads((self.path / "_delta_log" / "_last_checkpoint").read_bytes())["version"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    def _tidy(self) -> None:
        self._since_checkpoint += 1
        if self._since_checkpoint < CHECKPOINT_EVERY:
            return
        self._since_checkpoint = 0
        checkpoint(self.path, self._table)
        # an opened table keeps every commit it has replayed; a fresh one starts at the checkpoint
        self._table = open_table(self.path)


def check_writable_format(found: int) -> None:
    """Raise LogFormatUnknown unless this version writes logs of that format."""
    if found != FORMAT:
        raise LogFormatUnknown(
            f"the log has format {found}, and this version writes format {FORMAT}",
            remedy="stop the reader, run 'cdc migrate log -c FILE', and start it again",
        )


def sync_commit(table: Root, version: int) -> None:
    """Bring a commit of the table at that path to the disk: it is visible a moment before its writer has done so.

    Raises FileNotFoundError for one that was cleaned away, which is long after its sync.
    """
    commit = commit_file(table, version)
    atomic_file.sync(commit)
    atomic_file.sync(commit.parent)


def _now() -> int:
    return int(time.time() * 1000)
