"""Live files: the data files of a Delta table with their deletion vectors, read from `_delta_log` and committed to it.

delta-rs shows neither the deletion vectors nor the complete `add` actions of a table, and it cannot commit a deletion
vector. So this module reads the last checkpoint and the commits after it, and writes its own commits. A commit file is
created only if it does not exist.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, Self
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake.exceptions import CommitFailedError
from pyroaring import BitMap

from cdc.boot_clock import SECOND, BootTimestamp
from cdc.delta_protocol.actions import Action, decode_commit, remove_action
from cdc.delta_protocol.checkpoint_rows import UnknownActions, encode_checkpoint, later_rows
from cdc.delta_protocol.commits import commit_path, create_commit
from cdc.delta_protocol.deletion_vectors import Descriptor, decode, path_of
from cdc.delta_protocol.table_storage import TableStorage
from pipelines.sinks.delta.indexed.plain_schema import plain_schema

_HINT: Final = "_delta_log/_last_checkpoint"
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet\Z")
_NO_ROWS: Final = BitMap()
_READERS: Final = 8
"""Number of threads that read commits, because each file of an object store takes some milliseconds."""
ATTEMPTS: Final = 5
"""Maximum number of attempts to commit; an attempt fails if another client commits first."""
COMMITS_KEPT: Final = 50
"""Maximum number of commits whose actions stay in memory, so that the next checkpoint need not read them."""
ACTIONS_KEPT: Final = 100
"""Maximum number of actions of such a commit. A larger commit is read again: a table then needs a few MiB at most."""
RECENT: Final = 3600
"""A file is recent for this many seconds after it was written.

The sink sets `delta.deletedFileRetentionDuration` to at least the retention of kept cuts plus this time. If the log has
no `remove` action of a file, a VACUUM deletes the file once it is older than this property. So, if a file was removed
while it was recent, a VACUUM spares it for as long as a kept cut needs it, even without its `remove` action.
"""


class LogNotReadable(Exception):
    """Raised if `_delta_log` has a form that this module cannot read, although delta-rs or Spark may read it."""


class DirectoryReplaced(Exception):
    """Raised if the directory of a table no longer has the commit that this process read or made last."""


class MetadataChanged(CommitFailedError):
    """Raised if another client changed columns, properties or features of the table since it was read."""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A live data file of a Delta table, with its deleted rows."""

    add: Action
    """Its `add` action, without the outer key."""
    deleted: BitMap = _NO_ROWS
    """The numbers of its deleted rows, from its deletion vector."""
    _stats: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def path(self) -> str:
        """Path relative to the table's directory, without URL encoding."""
        return unquote(str(self.add["path"]))

    @property
    def vector(self) -> Descriptor | None:
        """Descriptor of its deletion vector; None if no row is deleted."""
        return self.add.get("deletionVector")

    @property
    def stats(self) -> dict[str, Any]:
        """Its statistics, with the field names of the Delta protocol; empty if there are none."""
        if not self._stats:
            self._stats.update(json.loads(self.add.get("stats") or "{}"))
        return self._stats

    @property
    def rows(self) -> int | None:
        """Number of rows, including deleted ones; None if the statistics do not contain it."""
        return self.stats.get("numRecords")

    def greatest(self, column: str) -> Any:
        """Return the greatest value of a column; None if it is unknown, or if the column has a null."""
        if self.stats.get("nullCount", {}).get(column) != 0:
            return None
        return self.stats.get("maxValues", {}).get(column)

    def without(self, rows: BitMap, vector: Descriptor, *, data_change: bool = True) -> LiveFile:
        """Return this file with another deletion vector, for a commit that deletes more of its rows.

        rows: all deleted rows, including those deleted earlier. vector: descriptor of the new deletion vector.
        """
        add, stats = self.add | {"deletionVector": vector, "dataChange": data_change}, self.stats
        if stats.get("tightBounds") is not False:
            stats = stats | {"tightBounds": False}
            add["stats"] = json.dumps(stats, ensure_ascii=False)
        return LiveFile(add, rows, stats)

    def remove(self, *, data_change: bool = True) -> Action:
        """Return the action that removes the file."""
        found = remove_action(
            self.add["path"], self.add["size"], self.add.get("partitionValues"), data_change=data_change
        )
        if self.vector is not None:
            found["deletionVector"] = self.vector
        return {"remove": found}


@dataclass(slots=True)
class LiveFiles:
    """The live files and the metadata of a Delta table, at the last version that this process read or committed."""

    storage: TableStorage
    version: int
    protocol: Action
    metadata: Action
    by_path: dict[str, LiveFile]
    """Path of a data file, as `_delta_log` spells it → the file."""
    with_vectors: bool = True
    transactions: dict[str, int] = field(default_factory=dict)
    """Application id of a `txn` → its version."""
    _unread: set[str] = field(default_factory=set)
    """Paths of live files whose deletion vector was not read yet."""
    _commits: dict[int, Sequence[Action]] = field(default_factory=dict)
    """Version of a commit → its actions, for small commits after the last checkpoint."""
    _written: dict[str, BootTimestamp] = field(default_factory=dict)
    """Path of a data file or deletion vector file → when this process added it; for the last RECENT seconds only."""

    @classmethod
    def read(cls, storage: TableStorage, version: int | None = None, *, with_vectors: bool = True) -> Self:
        """Read the newest version, or the given one. Raises LogNotReadable, DamagedVector and OSError.

        with_vectors: whether the deletion vectors are read; if not, `LiveFile.deleted` is empty.
        """
        start = _last_checkpoint(storage, version)
        found = cls(storage, -1, {}, {}, {}, with_vectors)
        if start is not None:
            found._apply(_checkpoint_actions(storage, start), start)
        found.advance(version)
        if not found.protocol or not found.metadata or (version is not None and found.version != version):
            raise LogNotReadable("commits are missing in _delta_log")
        return found

    @classmethod
    def after_first_commit(cls, storage: TableStorage, actions: Sequence[Action]) -> Self:
        """Return version 0 of a table, which consists of these actions; reads nothing."""
        found = cls(storage, -1, {}, {}, {})
        found._apply(actions, 0)
        found._keep(actions)
        return found

    @property
    def is_complete(self) -> bool:
        """Whether the deletion vectors of all live files were read."""
        return not self._unread

    def advance(self, upto: int | None = None) -> None:
        """Read the commits after `version`, at most to version `upto`.

        Only the deletion vectors of the last version are read. A VACUUM may have deleted those of earlier versions.
        """
        while upto is None or self.version < upto:
            try:
                content = self.storage.read(commit_path(self.version + 1))
            except FileNotFoundError:
                break
            actions = decode_commit(content)
            self._apply(actions, self.version + 1)
            self._keep(actions)
        self._read_vectors()

    def read_rows(self, file: LiveFile, names: Sequence[str], numbers: np.ndarray | None = None) -> pa.Table:
        """Read columns of a data file, including deleted rows.

        names: the columns. numbers: the numbers of the rows to read; None: all rows. Row groups that contain none of
        these rows are not read. The values of partition columns are texts.
        """
        with self.storage.open(file.path) as opened:
            content = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            groups, places = _row_groups(content.metadata, numbers)
            rows = self._read(content, groups, names)
        if places is not None:
            rows = rows.take(places)
        count = content.metadata.num_rows if places is None else len(places)
        return self._with_partition_values(file, rows, names, count)

    def read_groups(
        self, file: LiveFile, names: Sequence[str], is_needed: Callable[[pq.RowGroupMetaData], bool], rows: int
    ) -> Iterator[tuple[np.ndarray, pa.Table]]:
        """Yield columns of a data file, including deleted rows, as (row numbers, values) of about `rows` rows each.

        is_needed: returns whether a row group is read; the rows of the others are left out.
        """
        with self.storage.open(file.path) as opened:
            content = pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")
            for groups, numbers in _needed_groups(content.metadata, is_needed, rows):
                yield (
                    numbers,
                    self._with_partition_values(file, self._read(content, groups, names), names, numbers.size),
                )

    def _read(self, content: pq.ParquetFile, groups: Sequence[int], names: Sequence[str]) -> pa.Table:
        """Read those of the columns that the row groups of a data file have."""
        present = {*content.schema_arrow.names} - {*self.partition_columns}
        rows = content.read_row_groups(groups, columns=[name for name in names if name in present])
        return rows.cast(plain_schema(rows.schema))

    def _with_partition_values(self, file: LiveFile, rows: pa.Table, names: Sequence[str], count: int) -> pa.Table:
        """Return the columns of a data file; those that it does not have are partition columns, or null."""
        values = file.add.get("partitionValues") or {}
        columns = [
            rows[name] if name in rows.column_names else pa.repeat(pa.scalar(values.get(name), pa.string()), count)
            for name in names
        ]
        return pa.Table.from_arrays(columns, names=list(names))

    def commit(self, actions: Sequence[Action], files: Iterable[LiveFile | str]) -> None:
        """Commit actions as the next version.

        files: the changes that the actions make to `by_path`. A LiveFile is new or has a new deletion vector; a string
        is the path of a removed file. Raises FileExistsError, and changes nothing, if another client committed first.
        Raises DirectoryReplaced, and changes nothing, if the commit of this version is gone: another commit after it
        would leave a gap, and nobody could read the table.
        """
        if self.storage.is_gone(commit_path(self.version)):
            raise DirectoryReplaced(f"the commit file of version {self.version} no longer exists")
        create_commit(self.storage.create, self.version + 1, actions)
        self.version += 1
        self._keep(actions)
        for action in actions:
            self._apply_to_table(action)
        for file in files:
            if isinstance(file, str):
                self.by_path.pop(file, None)
            else:
                if file.add["path"] not in self.by_path:
                    self._written[file.add["path"]] = BootTimestamp.now()
                if file.vector is not None and (path := path_of(file.vector)) is not None:
                    self._written[path] = BootTimestamp.now()
                self.by_path[file.add["path"]] = file

    def write_checkpoint(self) -> None:
        """Write a checkpoint of this version, without the `remove` actions that no VACUUM needs.

        A VACUUM of another client deletes a removed file only if both the file and its `remove` action are older than
        the table's retention. So it spares a recent file even without the action. Nearly every commit of this writer
        removes recent files: deletion vectors, and files of single batches. In a day, a checkpoint would get a million
        `remove` actions of such files.

        A checkpoint in the table is never replaced, because another client may be reading it. Raises LogNotReadable if
        `_delta_log` has actions of a kind that this module does not know.
        """
        now = BootTimestamp.now()
        self._written = {path: at for path, at in self._written.items() if now.since(at) < RECENT * SECOND}
        rows = self._checkpoint_rows(lambda remove: not self._is_recent(remove))
        content, hint = encode_checkpoint(rows, self.version)
        with suppress(FileExistsError):  # of another client
            self.storage.create_durably(checkpoint_path(self.version), content)
        self.storage.replace(_HINT, hint)
        self._commits.clear()

    def skip_to(self, version: int, commit: Sequence[Action]) -> None:
        """Make a later version of the table, so that none of the versions in between ever exists.

        The new version has the files and positions of this one. A checkpoint of it takes the place of the commits in
        between. commit: the actions of the commit file, which change nothing. Raises LogNotReadable as
        `write_checkpoint` does.
        """
        if version <= self.version:
            raise ValueError(f"cannot skip from version {self.version!r} back to {version!r}")
        create_commit(self.storage.create_durably, version, commit)
        content, hint = encode_checkpoint(self._checkpoint_rows(lambda _remove: True), version)
        self.storage.create_durably(checkpoint_path(version), content)
        self.storage.replace(_HINT, hint)
        self.version = version
        self._commits.clear()

    def _checkpoint_rows(self, is_needed: Callable[[Action], bool]) -> pa.Table:
        """Return the rows of a checkpoint of this version. is_needed: as in later_rows. Raises LogNotReadable."""
        start = _last_checkpoint(self.storage, self.version)
        earlier = None if start is None else pa.concat_tables(_checkpoint_tables(self.storage, start))
        versions = range(0 if start is None else start + 1, self.version + 1)
        unread = [version for version in versions if version not in self._commits]
        with ThreadPoolExecutor(_READERS) as threads:
            known = self._commits | dict(zip(unread, threads.map(self._read_commit, unread), strict=True))
        try:
            return later_rows(earlier, [known[version] for version in versions], time.time(), is_needed)
        except UnknownActions as exc:
            raise LogNotReadable(str(exc)) from exc

    def _keep(self, actions: Sequence[Action]) -> None:
        """Keep the actions of the commit that created this version, for the next checkpoint."""
        if len(actions) <= ACTIONS_KEPT:
            self._commits[self.version] = actions
        self._commits.pop(self.version - COMMITS_KEPT, None)

    def _read_commit(self, version: int) -> Sequence[Action]:
        return decode_commit(self.storage.read(commit_path(version)))

    def _is_recent(self, remove: Action) -> bool:
        """Return whether this process recently wrote all files that a `remove` action protects from a VACUUM.

        These are the data file, unless it is still live, and the file of its deletion vector.
        """
        paths = [] if remove["path"] in self.by_path else [remove["path"]]
        if (vector := remove.get("deletionVector")) is not None:
            paths.append(path_of(vector) or "")
        return all(path in self._written for path in paths)

    @property
    def configuration(self) -> dict[str, str]:
        """The properties of the table."""
        return self.metadata.get("configuration") or {}

    @property
    def partition_columns(self) -> tuple[str, ...]:
        """Names of the partition columns."""
        return tuple(self.metadata.get("partitionColumns") or ())

    @property
    def features(self) -> frozenset[str]:
        """Names of the table features that a reader or a writer needs."""
        return frozenset([*(self.protocol.get("readerFeatures") or ()), *(self.protocol.get("writerFeatures") or ())])

    def _apply(self, actions: Iterable[Action], version: int) -> None:
        """Apply the actions of one commit or checkpoint: first all `remove` actions, then all `add` actions.

        The order matters because a commit removes and adds the same file to change its deletion vector.
        """
        added, removed = list[Action](), list[str]()
        for action in actions:
            if (add := action.get("add")) is not None:
                added.append(add)
            elif (remove := action.get("remove")) is not None:
                removed.append(remove["path"])
            else:
                self._apply_to_table(action)
        for path in removed:
            self.by_path.pop(path, None)
            self._unread.discard(path)
        for add in added:
            if "://" in add["path"] or add["path"].startswith("/"):
                raise LogNotReadable("_delta_log names data files outside of the table's directory")
            self.by_path[add["path"]] = LiveFile(add)
            if add.get("deletionVector") is not None and self.with_vectors:
                self._unread.add(add["path"])
        self.version = version

    def _apply_to_table(self, action: Action) -> None:
        """Apply a `metaData`, `protocol` or `txn` action; ignore every other action."""
        if "metaData" in action:
            self.metadata = action["metaData"]
        elif "protocol" in action:
            self.protocol = action["protocol"]
        elif "txn" in action:
            self.transactions[action["txn"]["appId"]] = int(action["txn"]["version"])

    def _read_vectors(self) -> None:
        """Read the deletion vectors of the files that were added since the last call."""
        read = cache(self.storage.read)  # a file contains the vectors of many data files
        for path in sorted(self._unread):
            file = self.by_path[path]
            if file.vector is not None:
                self.by_path[path] = LiveFile(file.add, decode(file.vector, read))
            self._unread.discard(path)


def new_data_path() -> str:
    """Return a path for a data file that does not exist yet."""
    return f"part-00000-{uuid.uuid4()}-c000.snappy.parquet"


def checkpoint_path(version: int) -> str:
    """Return the path of a single-file checkpoint, relative to the table's directory."""
    return f"_delta_log/{version:020d}.checkpoint.parquet"


def vector_paths(files: Iterable[LiveFile]) -> frozenset[str]:
    """Return the paths of the files that contain the deletion vectors of these data files."""
    found = (path_of(file.vector) for file in files if file.vector is not None)
    return frozenset(path for path in found if path is not None)


def _last_checkpoint(storage: TableStorage, version: int | None) -> int | None:
    """Return the version of the newest checkpoint; None if there is none. version: later checkpoints are ignored."""
    if version is None:
        try:
            return int(json.loads(storage.read(_HINT))["version"])
        except (FileNotFoundError, ValueError, KeyError):
            pass
    found = (_CHECKPOINT.match(path) for path in storage.list("_delta_log"))
    versions = [int(match[1]) for match in found if match is not None]
    return max((known for known in versions if version is None or known <= version), default=None)


def _checkpoint_actions(storage: TableStorage, version: int) -> Iterator[Action]:
    for rows in _checkpoint_tables(storage, version):
        yield from _actions(rows)


def _checkpoint_tables(storage: TableStorage, version: int) -> Iterator[pa.Table]:
    for path in _checkpoint_parts(storage, version):
        with storage.open(path) as file:
            yield pq.ParquetFile(file).read()


def _checkpoint_parts(storage: TableStorage, version: int) -> list[str]:
    prefix = f"_delta_log/{version:020d}.checkpoint."
    complete = _complete_parts([path for path in storage.list("_delta_log") if path.startswith(prefix)])
    if not complete:
        raise LogNotReadable("a checkpoint is neither a single Parquet file nor a complete set of parts")
    return complete


def _complete_parts(paths: Collection[str]) -> list[str]:
    """Return the single file or all parts of a classic checkpoint; an empty list for any other or incomplete one."""
    matches = [(match, path) for path in paths if (match := _CHECKPOINT.match(path)) is not None]
    single = [path for match, path in matches if match[2] is None]
    if single:
        return single
    return sorted(path for _, path in matches) if matches and len(matches) == int(matches[0][0][2] or 0) else []


def _actions(rows: pa.Table) -> Iterator[Action]:
    if "sidecar" in rows.column_names and rows["sidecar"].null_count < rows.num_rows:
        raise LogNotReadable("a checkpoint has sidecar files")
    for kind in ("protocol", "metaData", "txn", "add"):
        if kind not in rows.column_names:
            continue
        column = rows[kind].combine_chunks()
        for found in column.filter(column.is_valid()).to_pylist():
            yield {kind: _without_nulls(found)}


def _without_nulls(found: Action) -> Action:
    """Convert an action of a checkpoint to its form in a commit: maps become objects, null fields are left out."""
    known = {name: value for name, value in found.items() if value is not None}
    for name in ("partitionValues", "tags", "configuration", "options"):
        if isinstance(known.get(name), list):
            known[name] = dict(known[name])
    if "format" in known:
        known["format"] = _without_nulls(known["format"])
    if "deletionVector" in known:
        vector = known["deletionVector"]
        known["deletionVector"] = {
            name: value for name, value in vector.items() if value is not None and name != "maxRowIndex"
        }
    for name in ("stats_parsed", "partitionValues_parsed"):
        known.pop(name, None)
    return known


def _needed_groups(
    metadata: pq.FileMetaData, is_needed: Callable[[pq.RowGroupMetaData], bool], rows: int
) -> Iterator[tuple[list[int], np.ndarray]]:
    """Yield (row groups of a file, numbers of their rows), as in LiveFiles.read_groups."""
    chosen, numbers, first = list[int](), [np.empty(0, np.int64)], 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        if is_needed(group):
            chosen.append(number)
            numbers.append(np.arange(first, first + group.num_rows))
        first += group.num_rows
        if chosen and (sum(part.size for part in numbers) >= rows or number + 1 == metadata.num_row_groups):
            yield chosen, np.concatenate(numbers)
            chosen, numbers = [], [np.empty(0, np.int64)]


def _row_groups(metadata: pq.FileMetaData, numbers: np.ndarray | None) -> tuple[list[int], pa.Array | None]:
    """Return the row groups of a file that contain the wanted rows, and where the wanted rows are in them.

    numbers: the wanted rows of the file; None: all rows. The second result has, for each wanted row, its index among
    the rows of the returned row groups. It is None if all rows are wanted.
    """
    if numbers is None:
        return [*range(metadata.num_row_groups)], None
    sizes = np.array([metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)], np.int64)
    ends = np.cumsum(sizes)
    group_of = np.searchsorted(ends, numbers, side="right")
    groups = np.unique(group_of)
    skipped = ends - np.cumsum(np.where(np.isin(np.arange(sizes.size), groups), sizes, 0))
    return groups.tolist(), pa.array(numbers - skipped[group_of])
