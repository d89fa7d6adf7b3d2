"""CurrentVersion: the one owner of which version of a target is current, and of what was read from that version.

| what happens | call | what stays known |
|---|---|---|
| other clients may have committed | `refresh` | everything if nobody has, else nothing |
| delta-rs commits rows or files for this process | `record_commit` | everything but the files |
| this process commits rows or files without delta-rs | `record_own_commit` | everything but the files |
| delta-rs commits anything else for this process | none: `table` has the new version | nothing |
| another table may be in the place of this one | `reopen` | nothing |

A commit that another client makes before one of this process is found by the gap between their versions; then nothing
stays known. Commits that this process makes without delta-rs are read by delta-rs only if `table` is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable

from cdc.config import SchemaChanges
from cdc.delta_protocol.commits import commit_path
from cdc.delta_protocol.table_storage import storage_of
from cdc.errors import SinkUnavailable
from cdc.table import TableSchema
from pipelines.sinks.delta.damage_errors import reading
from pipelines.sinks.delta.delta_log_cleanup import CHECKPOINT_EVERY, is_newest
from pipelines.sinks.delta.schema_evolution import ColumnChange
from pipelines.sinks.delta.table_properties import TableMetadata

REOPEN_AFTER: Final = CHECKPOINT_EVERY
"""Number of new versions after which `refresh` opens the table again: an open DeltaTable keeps every commit that it has
read in memory.
"""


@dataclass(slots=True)
class VersionContents:
    """What was read from one version, or concluded from it; None or an empty collection: nothing yet."""

    metadata: TableMetadata | None = None
    all_columns: pa.Schema | None = None
    columns: pa.Schema | None = None
    """Columns as the part of the target sees them."""
    transactions: dict[str, int | None] = field(default_factory=dict)
    """Application id → position in its `txn`; None if the table has none."""
    fitting_change: ColumnChange | None = None
    """A change of columns after which the target has its columns, so that it needs no other look."""
    checked_columns: set[tuple[TableSchema, TableSchema | None]] = field(default_factory=set)
    """Schema of a batch, and of the published table, for which the columns were checked."""
    adapted_schemas: dict[tuple[TableSchema, SchemaChanges], TableSchema] = field(default_factory=dict)
    """Schema of a batch and its policy → the schema with the types of the target."""
    actions: pa.Table | None = None
    """Data files of the part."""
    file_count: tuple[int, int] | None = None
    """Number and bytes of the data files of the part."""
    first_commit: Sequence[dict[str, Any]] | None = None
    """The only commit of a table that this process has created."""

    def forget_files(self) -> None:
        """Forget what a commit of rows changes."""
        self.actions = None
        self.file_count = None
        self.first_commit = None


@dataclass(frozen=True, slots=True)
class IndexedCommit:
    """A commit of the indexed writer."""

    version: int
    copied: int
    """Bytes of the data files that it wrote again."""


class CurrentVersion:
    """The version of one Delta table that this process has read or committed last. One thread at a time uses it."""

    def __init__(self, uri: str, table: DeltaTable | None) -> None:
        """table: None for a table that was just created; delta-rs then opens it when `table` is used."""
        self.uri = uri
        self._table = table
        self._committed = 0 if table is None else table.version()
        """Version that this process has committed or opened last."""
        self._opened_at = self._committed
        self._contents = VersionContents()
        self._contents_of = self._committed
        """Version that `_contents` belongs to."""
        self._seen: tuple[int, tuple[float, ...] | None] = -1, None
        """A version, and the identity that its commit file had at the last `check_directory`."""
        self.last_column_change: int | None = None
        """End of the range for which the columns changed last; 0 if they never did, None if it has to be read.

        Commits of rows keep it. It becomes None when this process changes columns, or finds a version that it did not
        know.
        """
        self.indexed_commit: IndexedCommit | None = None
        """The last commit of the indexed writer."""

    @property
    def number(self) -> int:
        """The version that this process has read or committed last."""
        return self._committed if self._table is None else max(self._committed, self._table.version())

    @property
    def contents(self) -> VersionContents:
        """What is known of this version; a caller that reads more of it adds that."""
        if self._contents_of != self.number:
            self._contents_of = self.number
            self._contents = VersionContents()
        return self._contents

    @property
    def table(self) -> DeltaTable:
        """The Delta table. If this process has committed without delta-rs, delta-rs first reads these commits."""
        if self._table is None or self._table.version() < self._committed:
            return self._read_commits()
        return self._table

    @property
    def is_overtaken(self) -> bool:
        """Whether another client has committed after this version."""
        return storage_of(self.uri).exists(commit_path(self.number + 1))

    @property
    def copied(self) -> int | None:
        """Bytes of the data files that this version wrote again; None if the indexed writer has not committed it."""
        commit = self.indexed_commit
        return commit.copied if commit is not None and commit.version == self.number else None

    def refresh(self) -> None:
        """Read the newest version, which may come from other clients; raises TargetUnusable if it cannot be read."""
        before = self.number
        self.check_directory()
        with reading(self.uri):
            if self._table is not None and self._table.version() - self._opened_at >= REOPEN_AFTER:
                self.reopen()
            elif not is_newest(self.uri, before):
                self._read_commits()
        if self.number != before:
            self.last_column_change = None

    def reopen(self) -> DeltaTable:
        """Open the newest version of the table again, so that the commits read earlier leave the memory."""
        self._table = DeltaTable(self.uri)
        self._opened_at = self._committed = self._table.version()
        return self._table

    def _read_commits(self) -> DeltaTable:
        before, table = self.number, self._table
        if table is None or self._committed - table.version() >= REOPEN_AFTER:
            table = self.reopen()
        else:
            table.update_incremental()
        if self.number != before:
            self.last_column_change = None
        return table

    def record_commit(self, since: int, transactions: Mapping[str, int]) -> None:
        """Keep what is known after a commit of rows or files that this process has just made.

        since: the version before the commit. transactions: application id → position of each `txn` in the commit. Does
        nothing if another client has committed after `since`.
        """
        if self.number == since + 1 and self._contents_of == since:
            self._contents_of = self.number
            self._contents.forget_files()
            self._contents.transactions.update(transactions)

    def record_own_commit(self, since: int, version: int, transactions: Mapping[str, int]) -> None:
        """Record a commit of rows or files that this process made without delta-rs.

        version: the version that the commit created. Other arguments: see record_commit.
        """
        self._committed = version
        if version != since + 1:
            self.last_column_change = None
        self.record_commit(since, transactions)

    def check_directory(self) -> None:
        """Check that the directory still has the commit that this process read or made last.

        Raises SinkUnavailable otherwise: another directory, for instance an older copy, has taken its place. A commit
        on top of it would leave a gap in its Delta log. The sink then opens its targets again.
        """
        version = self.number
        identity = storage_of(self.uri).identity(commit_path(version))
        seen_version, seen = self._seen
        if identity is None or (seen_version == version and seen != identity):
            raise _replaced(self.uri, f"commit {version} is {'missing' if identity is None else 'another one'}")
        self._seen = version, identity

    def check_published(self, published: int) -> None:
        """Raise SinkUnavailable if the table is older than its published version."""
        if self.number < published:
            raise _replaced(self.uri, f"it has version {self.number}, and version {published} was published")

    def check_kept(self, version: int) -> None:
        """Check that a commit which this process read before it made its own ones is still there, as `check_directory`
        does. A table in an object store is not checked.
        """
        if storage_of(self.uri).is_gone(commit_path(version)):
            raise _replaced(self.uri, f"commit {version} is missing")


def _replaced(uri: str, cause: str) -> SinkUnavailable:
    return SinkUnavailable(
        f"the directory of target {uri!r} was replaced while the sink wrote to it: {cause}",
        remedy="nothing: the sink opens its targets again, and merges from the position that it finds there",
    )
