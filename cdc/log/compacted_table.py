"""The `compacted` table: the latest state of each key up to the horizon, and the only writer of this table.

The table contains sorted runs. Each run is a partition, so a merge of runs replaces whole partitions in one commit.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self

from deltalake import DeltaTable

from cdc import atomic_file
from cdc.bucket_files import Root, as_root, remove_folder
from cdc.delta_protocol.actions import Action
from cdc.errors import LogCorrupt, LogFenced
from cdc.failpoint import hit
from cdc.log import retired_files
from cdc.log.disk_format import (
    CHANGES,
    COMPACTED,
    LogFile,
    LogIdentity,
    floor_id,
    format_of,
    log_file_of_action,
    segment_of,
)
from cdc.log.fenced_table import FencedTable, sync_commit
from cdc.log.table_io import add_actions, is_table, last_commit_info, open_table, transaction_version
from cdc.position import Position


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A data file of a run that is written but not committed yet."""

    name: str
    """Path of the file relative to the table's directory, such as `segment=N/x.parquet`."""
    rows: int
    size: int
    """Size of the file in bytes."""
    statistics: str
    """Delta statistics of the file as JSON text, from `cdc.log.disk_format.delta_statistics`."""


@dataclass(frozen=True, slots=True)
class Run:
    """One sorted run of `compacted`, with at most one row per key."""

    number: int
    files: tuple[LogFile, ...]
    rows: int
    size: int
    """Total size of the run's files in bytes."""
    relations: tuple[int, int]
    """Least and greatest relation number in the run."""


@dataclass(frozen=True, slots=True)
class CompactedState:
    """The `compacted` table at one version."""

    horizon: Position
    """Position up to which the log is compacted; 0 before the first run."""
    floor: Position
    """Position up to which tombstones were removed. A target at an earlier position must be rebuilt."""
    runs: tuple[Run, ...]
    """All runs of the table, oldest first."""
    version: int

    @property
    def files(self) -> list[LogFile]:
        """Return the files of all runs."""
        return [file for run in self.runs for file in run.files]


def read_compacted_state(
    root: str | Root, log_id: str | None = None, version: int | None = None
) -> CompactedState | None:
    """Read the `compacted` table of the log under `root`, at its latest or at the given version.

    Return None if the log was never compacted. `log_id` is the id of the table `changes`; by default it is read from
    that table. Raises LogCorrupt if `compacted` belongs to another log, or if the version no longer exists.
    """
    path = as_root(root) / COMPACTED
    if not is_table(path):
        return None
    return _state(path, open_table(path, version), log_id or str(open_table(as_root(root) / CHANGES).metadata().id))


def last_commit(root: str | Root) -> dict[str, Any]:
    """Return the metadata of the latest commit of the `compacted` table, which must exist.

    The value of `timestamp` is in milliseconds UTC.
    """
    path = as_root(root) / COMPACTED
    return last_commit_info(path, open_table(path))


def secured_horizon(root: str | Root, log_id: str) -> Position:
    """Sync the latest commit of `compacted`, and return its horizon, which then survives a power loss.

    Return 0 if the log was never compacted.
    """
    found = read_compacted_state(root, log_id)
    if found is None:
        return Position(0)
    sync_commit(as_root(root) / COMPACTED, found.version)  # its files were synced before the commit
    return found.horizon


class CompactedWriter:
    """The only writer of the `compacted` table, for one thread of one process.

    Each commit of this writer fences all earlier writers of the table.
    """

    def __init__(self, root: str | Root, log_id: str) -> None:
        """Open the `compacted` table of the log under `root`; `log_id` is the id of the table `changes`.

        Raises LogCorrupt if `compacted` belongs to another log, LogUnwritable if its latest commit cannot be synced.
        """
        self._root = as_root(root)
        self._fenced = FencedTable(self._root / COMPACTED, log_id)
        self._state = self._current_state()
        self._has_cleaned_up = False

    @classmethod
    def open(cls, root: str | Root, identity: LogIdentity, log_id: str) -> Self:
        """Return a writer for the log under `root`, and create the `compacted` table if it does not exist.

        `identity` and `log_id` are those of the table `changes`. Raises LogCorrupt if `compacted` belongs to another
        source.
        """
        path = as_root(root) / COMPACTED
        FencedTable.create(path, identity)
        writer = cls(root, log_id)
        if writer._fenced.identity != identity:
            raise LogCorrupt(
                f"table {COMPACTED!r} under {str(root)!r} belongs to another log: its source database is not that of "
                f"table {CHANGES!r}"
            )
        return writer

    @property
    def horizon(self) -> Position:
        """Position up to which the log is compacted; 0 before the first run."""
        return self._state.horizon

    @property
    def floor(self) -> Position:
        """Position up to which tombstones were removed."""
        return self._state.floor

    @property
    def runs(self) -> tuple[Run, ...]:
        """All runs of the table, oldest first."""
        return self._state.runs

    def new_run(self) -> tuple[int, Root]:
        """Create the directory of the next run, and return the number of the run and the directory.

        The first call also removes the files of runs that a killed compaction did not commit. Raises LogFenced if
        another compaction has committed or created the same run.
        """
        path = self._fenced.path
        used = {segment_of(place.name) for place in path.glob("segment=*")}
        if not self._has_cleaned_up:
            self._has_cleaned_up = True
            removed = retired_files.segments_with_removed_files(self._root, COMPACTED)
            kept = {run.number for run in self.runs} | removed
            if uncommitted := used - kept:
                # their writer may still run: this commit fences it
                self.commit([], horizon=self.horizon, floor=self.floor)
            for number in uncommitted:
                remove_folder(path / f"segment={number}")  # a vacuum may delete the same files
        number = max(used | {run.number for run in self.runs}, default=0) + 1
        folder = path / f"segment={number}"
        try:
            folder.mkdir()
        except FileExistsError as exc:
            raise LogFenced(f"another compaction of the log has created run {number}") from exc
        return number, folder

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Run the block; if it fails after another compaction has committed, raise LogFenced instead of its error.

        A compaction removes the uncommitted files of other compactions. So a missing file does not prove damage.
        """
        try:
            yield
        except Exception:
            self._fenced.check_latest()
            raise

    def commit(
        self, written: Sequence[WrittenFile], *, horizon: Position, floor: Position, replaces: Collection[int] = ()
    ) -> None:
        """Add files, remove the runs in `replaces`, and set horizon and floor in one commit.

        The commit is durable when the method returns. Raises LogFenced if another compaction has committed. Raises
        LogCorrupt if a file differs from what was written.
        """
        replaced = [run for run in self.runs if run.number in set(replaces)]
        if len(replaced) != len(set(replaces)):
            raise LogFenced(
                f"runs {sorted(replaces)!r} of the compacted log cannot be replaced: another compaction has "
                "removed some of them"
            )
        if horizon < self.horizon or floor < self.floor or floor > horizon:
            raise LogFenced(
                f"a commit of the compacted log is refused: horizon and floor would change from "
                f"{self.horizon!s} and {self.floor!s} to {horizon!s} and {floor!s}, but neither may decrease, and the "
                "floor must not exceed the horizon"
            )
        added = [self._added(file, horizon) for file in written]
        self._sync(written)
        removed = {self._relative(file): file.size for run in replaced for file in run.files}
        retired_files.record_removal(self._root, COMPACTED, removed, self._fenced.next_version)
        self._fenced.commit(
            [*added, *(FencedTable.removed(name, size) for name, size in removed.items())],
            int(horizon),
            {
                "cdc.horizon": str(horizon),
                "cdc.floor": str(floor),
                "cdc.rows": str(sum(file.rows for file in written)),
            },
            {floor_id(self._fenced.log_id): int(floor)},
        )
        self._state = self._current_state()

    def give_up(self, name: str) -> None:
        """Remove one file from the table, although its rows are lost. The horizon does not change.

        `name` is the path of the file relative to the table's directory. The caller has already marked the tables in
        the file for a resync. Raises LogFenced if another compaction committed.
        """
        sizes = {self._relative(file): file.size for file in self._state.files}
        self._remove_files({name: sizes[name]}, self.horizon, self.floor)

    def start_over(self) -> None:
        """Remove all runs and set the horizon to 0, so that the log is compacted again from its beginning.

        The log must never have been trimmed, and its reader must not run: a trim up to the previous horizon would
        remove changes that exist nowhere else. Raises LogFenced if another compaction has committed.
        """
        self._remove_files({self._relative(file): file.size for file in self._state.files}, Position(0), Position(0))

    def _remove_files(self, files: Mapping[str, int], horizon: Position, floor: Position) -> None:
        retired_files.record_removal(self._root, COMPACTED, files, self._fenced.next_version)
        hit("drop_noted")
        self._fenced.commit(
            [FencedTable.removed(name, size) for name, size in files.items()],
            int(horizon),
            {"cdc.horizon": str(horizon), "cdc.floor": str(floor), "cdc.dropped": str(len(files))},
            {floor_id(self._fenced.log_id): int(floor)},
        )
        hit("drop_committed")
        self._state = self._current_state()

    def _current_state(self) -> CompactedState:
        return _state(self._fenced.path, self._fenced.table, self._fenced.log_id)

    def _relative(self, file: LogFile) -> str:
        return file.path.removeprefix(f"{self._fenced.path}/")

    def _added(self, file: WrittenFile, horizon: Position) -> Action:
        action = self._fenced.added(file.name, file.size, file.rows, file.statistics)
        last = json.loads(file.statistics).get("maxValues", {}).get("position")
        if last is None or last > horizon:
            raise LogCorrupt(
                f"the statistics of file {file.name!r} of the compacted log do not prove that its rows end at or below "
                f"the horizon {horizon!s}"
            )
        return action

    def _sync(self, written: Sequence[WrittenFile]) -> None:
        path = self._fenced.path
        for file in written:
            atomic_file.sync(path / file.name)
        for number in {segment_of(file.name) for file in written}:
            atomic_file.sync(path / f"segment={number}")
        atomic_file.sync(path)


def _state(path: Root, table: DeltaTable, log_id: str) -> CompactedState:
    format_of(table.metadata().description)  # raises for a newer format
    rows = add_actions(path, table).to_pylist()
    horizon, floor = (transaction_version(path, table, name) for name in (log_id, floor_id(log_id)))
    if rows and horizon is None:
        raise LogCorrupt(
            f"table {str(path)!r} was compacted from another log than the one in the same directory",
            remedy="remove the directory of the table",
        )
    numbers = sorted({int(row["partition.segment"]) for row in rows})
    return CompactedState(
        horizon=Position(horizon or 0),
        floor=Position(floor or 0),
        runs=tuple(_run(path, n, [row for row in rows if int(row["partition.segment"]) == n]) for n in numbers),
        version=int(table.version()),
    )


def _run(path: Root, number: int, rows: Sequence[Mapping[str, Any]]) -> Run:
    files = tuple(sorted((log_file_of_action(path, row) for row in rows), key=lambda file: file.path))
    least = [row["min.relation"] for row in rows if row["min.relation"] is not None]
    greatest = [row["max.relation"] for row in rows if row["max.relation"] is not None]
    return Run(
        number=number,
        files=files,
        rows=sum(file.rows for file in files),
        size=sum(file.size for file in files),
        relations=(min(least, default=0), max(greatest, default=0)),
    )
