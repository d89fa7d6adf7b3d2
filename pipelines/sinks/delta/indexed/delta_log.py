"""Live files: the data files of a Delta table with their deletion vectors, read from `_delta_log` and committed to it.

delta-rs shows neither the deletion vectors nor the complete `add` actions of a table, and it cannot commit a deletion
vector. So this module reads the last checkpoint and the commits after it, and it writes commits of its own: a file that
is created only if it does not exist. delta-rs makes the checkpoints, in a copy of the log; it keeps deletion vectors.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Self
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from pyroaring import BitMap

from cdc.log.boot_clock import SECOND, BootTimestamp
from pipelines.sinks.delta.indexed.deletion_vectors import Descriptor, decode, path_of
from pipelines.sinks.delta.indexed.table_storage import TableStorage

Action = dict[str, Any]
"""An action of `_delta_log`: one JSON object with one key, the kind of the action."""

_HINT: Final = "_delta_log/_last_checkpoint"
_CHECKPOINT: Final = re.compile(r"_delta_log/(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10}))?\.parquet\Z")
_NO_ROWS: Final = BitMap()
_READERS: Final = 8
"""Threads that copy the files of a log; in an object store each file takes some milliseconds."""
ATTEMPTS: Final = 5
"""Number of attempts to commit; each but the first follows a commit of another client."""
RECENT: Final = 3600
"""Seconds for which a file counts as young; the retention of removed files exceeds that of kept cuts by as much."""


class LogNotReadable(Exception):
    """Raised if `_delta_log` has a form that this module does not read; other writers may read it."""


class MetadataChanged(CommitFailedError):
    """Raised if another client changed columns, properties or features of the table since it was read."""


@dataclass(frozen=True, slots=True)
class LiveFile:
    """A data file of the newest version."""

    add: Action
    """Its `add` action, without the outer key."""
    deleted: BitMap = _NO_ROWS
    """Its deleted rows."""
    _stats: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def path(self) -> str:
        """Path in the table's directory."""
        return unquote(str(self.add["path"]))

    @property
    def vector(self) -> Descriptor | None:
        """Descriptor of its deletion vector; None if no row is deleted."""
        return self.add.get("deletionVector")

    @property
    def stats(self) -> dict[str, Any]:
        """Its statistics, as the protocol names them; empty if there are none."""
        if not self._stats:
            self._stats.update(json.loads(self.add.get("stats") or "{}"))
        return self._stats

    @property
    def rows(self) -> int | None:
        """Number of rows, also the deleted ones; None if the statistics do not say it."""
        return self.stats.get("numRecords")

    def greatest(self, column: str) -> Any:
        """Return the greatest value of a column; None if it is unknown, or if the column has a null."""
        if self.stats.get("nullCount", {}).get(column) != 0:
            return None
        return self.stats.get("maxValues", {}).get(column)

    def without(self, rows: BitMap, vector: Descriptor, *, data_change: bool = True) -> LiveFile:
        """Return the file after a commit deleted more rows. rows: all deleted rows. vector: their descriptor."""
        stats = self.stats | {"tightBounds": False}
        add = self.add | {
            "deletionVector": vector,
            "stats": json.dumps(stats, ensure_ascii=False),
            "dataChange": data_change,
        }
        return LiveFile(add, rows, stats)

    def remove(self, *, data_change: bool = True) -> Action:
        """Return the action that removes the file."""
        found: Action = {
            "path": self.add["path"],
            "deletionTimestamp": int(time.time() * 1000),
            "dataChange": data_change,
            "extendedFileMetadata": True,
            "partitionValues": self.add.get("partitionValues") or {},
            "size": self.add["size"],
        }
        if self.vector is not None:
            found["deletionVector"] = self.vector
        return {"remove": found}


@dataclass(slots=True)
class LiveFiles:
    """The newest version of a Delta table that this process has read."""

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
    _written: dict[str, BootTimestamp] = field(default_factory=dict)
    """Data file or file of vectors that this process added in the last RECENT seconds → when it did."""

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

    def advance(self, upto: int | None = None) -> None:
        """Read the commits after `version`, at most to version `upto`.

        Only the vectors of the last version are read: a VACUUM may have deleted those in between.
        """
        while upto is None or self.version < upto:
            try:
                content = self.storage.read(commit_path(self.version + 1))
            except FileNotFoundError:
                break
            self._apply([json.loads(line) for line in content.splitlines() if line.strip()], self.version + 1)
        self._read_vectors()

    def commit(self, actions: Sequence[Action], files: Iterable[LiveFile | str]) -> None:
        """Commit actions as the next version.

        files: what changes in `by_path`, as the actions say: files that are new or have another vector, and paths of
        removed files. Raises FileExistsError, and changes nothing, if another client committed first.
        """
        self.storage.create(commit_path(self.version + 1), encode_commit(actions))
        self.version += 1
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

        A VACUUM of another client spares the files of `remove` actions within the retention of the table, and files
        younger than that. Nearly every commit of this writer removes young files: vectors, and files of single batches.
        Their `remove` actions would make each checkpoint larger, by a million in a day.

        delta-rs writes the checkpoint in a copy of the log. A checkpoint in the table is never replaced, because
        another client may be reading it.
        """
        now = BootTimestamp.now()
        self._written = {path: at for path, at in self._written.items() if now.since(at) < RECENT * SECOND}
        with TemporaryDirectory(prefix="cdc-checkpoint-") as folder:
            copy, path = Path(folder), checkpoint_path(self.version)
            (copy / "_delta_log").mkdir()
            names = list(self._log_files())
            with ThreadPoolExecutor(_READERS) as threads:
                for name, content in zip(names, threads.map(self.storage.read, names), strict=True):
                    (copy / name).write_bytes(content)
            DeltaTable(folder).create_checkpoint()
            rows = pq.read_table(copy / path)
        needed = [remove is None or not self._is_recent(remove) for remove in rows["remove"].to_pylist()]
        rows, shortened = rows.filter(pa.array(needed)), pa.BufferOutputStream()
        pq.write_table(rows, shortened, store_schema=False)
        with suppress(FileExistsError):  # of another client
            self.storage.create(path, shortened.getvalue())
        self.storage.replace(_HINT, json.dumps({"version": self.version, "size": rows.num_rows}).encode())

    def _log_files(self) -> Iterator[str]:
        """Yield the paths of the newest checkpoint and of the commits after it, up to this version."""
        start = _last_checkpoint(self.storage, self.version)
        if start is not None:
            yield from _checkpoint_parts(self.storage, start)
        for version in range(0 if start is None else start + 1, self.version + 1):
            yield commit_path(version)

    def _is_recent(self, remove: Action) -> bool:
        """Return whether this process wrote all files that a `remove` action protects from a VACUUM, and recently."""
        paths = [] if remove["path"] in self.by_path else [remove["path"]]
        if remove["deletionVector"] is not None:
            paths.append(path_of(remove["deletionVector"]) or "")
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
        """Apply the actions of one commit or checkpoint, in which a file may be removed and added with a new vector."""
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
                raise LogNotReadable("data files outside of the table's directory")
            self.by_path[add["path"]] = LiveFile(add)
            if add.get("deletionVector") is not None and self.with_vectors:
                self._unread.add(add["path"])
        self.version = version

    def _apply_to_table(self, action: Action) -> None:
        """Apply an action that concerns no file."""
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


def commit_info(operation: str, **more: str) -> Action:
    """Return the `commitInfo` action of a commit made now. more: further fields."""
    info = {"timestamp": int(time.time() * 1000), "operation": operation, "operationParameters": {}}
    return {"commitInfo": info | more}


def encode_commit(actions: Iterable[Action]) -> bytes:
    """Return the content of a commit file: one JSON object in each line."""
    lines = (json.dumps(action, ensure_ascii=False, separators=(",", ":")) + "\n" for action in actions)
    return "".join(lines).encode()


def commit_path(version: int) -> str:
    """Return the path of a commit in a table's directory."""
    return f"_delta_log/{version:020d}.json"


def checkpoint_path(version: int) -> str:
    """Return the path of a checkpoint with a single file in a table's directory."""
    return f"_delta_log/{version:020d}.checkpoint.parquet"


def vector_paths(files: Iterable[LiveFile]) -> frozenset[str]:
    """Return the paths of the files with the deletion vectors of these data files."""
    found = (path_of(file.vector) for file in files if file.vector is not None)
    return frozenset(path for path in found if path is not None)


def _last_checkpoint(storage: TableStorage, version: int | None) -> int | None:
    """Return the version of the newest checkpoint, not after `version`; None if there is none."""
    if version is None:
        try:
            return int(json.loads(storage.read(_HINT))["version"])
        except (FileNotFoundError, ValueError, KeyError):
            pass
    found = (_CHECKPOINT.match(path) for path in storage.list("_delta_log"))
    versions = [int(match[1]) for match in found if match is not None]
    return max((known for known in versions if version is None or known <= version), default=None)


def _checkpoint_actions(storage: TableStorage, version: int) -> Iterator[Action]:
    for path in _checkpoint_parts(storage, version):
        with storage.open(path) as file:
            yield from _actions(pq.read_table(file))


def _checkpoint_parts(storage: TableStorage, version: int) -> list[str]:
    prefix = f"_delta_log/{version:020d}.checkpoint."
    complete = _complete_parts([path for path in storage.list("_delta_log") if path.startswith(prefix)])
    if not complete:
        raise LogNotReadable("a checkpoint with files of another form")
    return complete


def _complete_parts(paths: Collection[str]) -> list[str]:
    """Return the files of one complete checkpoint in the classic form, with one part or with several."""
    matches = [(match, path) for path in paths if (match := _CHECKPOINT.match(path)) is not None]
    single = [path for match, path in matches if match[2] is None]
    if single:
        return single
    return sorted(path for _, path in matches) if matches and len(matches) == int(matches[0][0][2] or 0) else []


def _actions(rows: pa.Table) -> Iterator[Action]:
    if "sidecar" in rows.column_names and rows["sidecar"].null_count < rows.num_rows:
        raise LogNotReadable("a checkpoint with sidecar files")
    for kind in ("protocol", "metaData", "txn", "add"):
        if kind not in rows.column_names:
            continue
        column = rows[kind].combine_chunks()
        for found in column.filter(column.is_valid()).to_pylist():
            yield {kind: _without_nulls(found)}


def _without_nulls(found: Action) -> Action:
    """Return an action of a checkpoint as it is in a commit: maps as objects, and no absent fields."""
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
