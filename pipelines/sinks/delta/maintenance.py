"""Maintenance of a Delta sink's targets: compaction of small files, ordering of rows, removal of unused files.

The sink calls it after a publish, when no merge runs, so that every table still has one writer. It does one job on one
table at a time, for at most a tenth of the time.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
import pyarrow.fs as pafs
import structlog
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from cdc.failpoint import hit
from cdc.stores.table_features import unsupported_features
from cdc.target_names import RELATION_COLUMN
from pipelines.sinks.delta.delta_log import expired_log_files, paths_of, remove_old_commits
from pipelines.sinks.delta.published import KeptCut
from pipelines.sinks.delta.target import DeltaTarget
from pipelines.sinks.delta.target_layout import partition_text

COMPACT_ABOVE: Final = 64
"""Files since the last compaction above which a table is compacted: each merge adds one and opens all."""
SMALL: Final = 16 << 20
"""Bytes of a file that most compactions leave as it is; larger ones are merged when there are many."""
URGENT: Final = 4
"""Multiple of COMPACT_ABOVE at which a compaction no longer waits for its share of the time."""
SHARE: Final = 10
"""One part of the time in this many is for maintenance."""
PINNED_FOR: Final = 86_400.0
"""Seconds after which a pinned version is no longer read: its reader was killed."""
FIRST_AFTER: Final = 60.0
"""Seconds until the first check of a table that is new to a driver."""
AT_ONCE: Final = 1_000
"""Files removed in one turn; the rest is removed in the next one."""
REMOVES_FOR: Final = 1.0
"""Seconds after which a turn stops removing: an object store takes several for a thousand files."""

READ_AT_ONCE: Final = 20
"""Versions whose files are read in one go; each takes some 20 ms."""
UNKNOWN_FILE_AGE: Final = 86_400.0
"""Seconds of age at which a file goes that may still be committed by another client: no job takes a day."""

ORDERED: Final = "cdc.ordered"
"""Property of a target, JSON: `by`, the columns of its last ordering; `upto`, group → time of its newest file."""
MAX_PARTS: Final = 1_000
"""Partitions above which a target is not ordered: the property names each."""
MEMORY: Final = 256 << 20
"""Bytes of memory for the sort of a group, without its widest rows; more is spilled to disk."""

_PARTED: Final = f"{RELATION_COLUMN}="
"""Prefix of a partition directory with rows, although a leading underscore hides other files."""
_OWN: Final = "delta.enableExpiredLogCleanup"
_GRACE: Final = "delta.deletedFileRetentionDuration"

log = structlog.get_logger("upkeep")


@dataclass(frozen=True, slots=True)
class ZOrdering:
    """Which file groups are ordered; sizes in bytes."""

    least: int = 16 << 20
    """A smaller group is one file or two, and ordering would save no query a file."""
    most: int = 128 << 20
    """A larger group is not ordered: the stream waits meanwhile, about a second for 15 MiB."""
    file: int = 32 << 20
    """Size of an ordered file; compaction of small files has to leave it as it is."""
    fresh: int = 4
    """A group is due when at least one in this many of its bytes is not ordered."""

    def due(self, target: DeltaTarget) -> list[FileGroup]:
        """The groups to order, the one with the most unordered bytes first."""
        found = [part for part in file_groups(target) if self.least <= part.size <= self.most]
        ripe = [part for part in found if part.fresh * self.fresh >= part.size]
        return sorted(ripe, key=lambda part: -part.fresh)

    def too_large(self, target: DeltaTarget) -> list[FileGroup]:
        """The groups that are never ordered."""
        return [part for part in file_groups(target) if part.size > self.most]

    def order(self, target: DeltaTarget, part: FileGroup) -> None:
        """Order one group and record it; a kill in between repeats the work."""
        target.table.optimize.z_order(
            target.cluster_by, partition_filters=part.filters, target_size=self.file, max_spill_size=MEMORY
        )
        hit("delta_upkeep_ordered")
        upto, now = _noted(target), {found.name: found.youngest for found in file_groups(target)}
        upto = {name: made for name, made in upto.items() if name in now} | {part.name: now[part.name]}
        said = json.dumps({"by": target.cluster_by, "upto": upto})
        target.table.alter.set_table_properties({ORDERED: said}, raise_if_not_exists=False)


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    """Settings of a sink's cuts and of the maintenance of its targets; times in seconds."""

    every: float = 300.0
    """Interval between two searches for unused files in one table; 0: no maintenance at all."""
    vacuum_after: float = 3600.0
    """Time for which a file stays that neither the newest version nor a kept cut needs."""
    retain: float = 86400.0
    """Time for which cuts are kept."""
    keep_commits: int = 100
    """Number of newest commits that stay in the log of a target in a directory."""
    ordering: ZOrdering = field(default_factory=ZOrdering)
    """Which files of a target with cluster_by are ordered."""


@dataclass(slots=True)
class TableFiles:
    """Which files of one table are not needed any more, and for how long one driver has seen that.

    A file is needed while the newest version has it, or a version that a kept cut lists. A file that is not needed may
    be removed once it was seen so for a while without a break. That is in memory only: a new driver begins to wait
    again. A file that this driver never saw in the table may be one that another client has yet to commit, or one
    that a killed writer left; it is removed when it is also a day old.
    """

    marks: dict[str, float] = field(default_factory=dict)
    """File that is not needed → since when it was seen so."""
    seen: dict[int, float] = field(default_factory=dict)
    """Version that cuts list → since when it was seen listed."""
    read: dict[int, frozenset[str]] = field(default_factory=dict)
    """Version → its files; a version never changes."""
    known: set[str] = field(default_factory=set)
    """Files that were in the table when this driver looked, or in a version that it read."""

    def needed(
        self, listed: Iterable[int], now: float, after: float, files_of: Callable[[int], frozenset[str]]
    ) -> frozenset[str] | None:
        """The files of the versions that kept cuts list; None while some of them are left to be read the next time.

        A version that was listed only lately is not read: of its files none can have left as long ago as `after`.
        """
        self.seen = {version: self.seen.get(version, now) for version in listed}
        due = [version for version, since in self.seen.items() if now - since >= after / 2]
        unread = [version for version in due if version not in self.read]
        fresh = {version: files_of(version) for version in unread[:READ_AT_ONCE]}
        self.read = {version: files for version, files in (self.read | fresh).items() if version in due}
        found = frozenset[str]().union(*self.read.values())
        self.known |= found
        return found if len(fresh) == len(unread) else None

    def removable(self, present: Mapping[str, float], needed: frozenset[str], now: float, after: float) -> list[str]:
        """Files that were marked for as long as `after`; marks what is seen not needed for the first time.

        present: file → its age in seconds.
        """
        self.marks = {path: self.marks.get(path, now) for path in present if path not in needed}
        self.known &= present.keys()
        return sorted(
            path
            for path, since in self.marks.items()
            if now - since >= after and (path in self.known or present[path] >= UNKNOWN_FILE_AGE)
        )


@dataclass(slots=True)
class _Turn:
    """The state of the maintenance of one table."""

    due: float
    """Time of the next search for unused files."""
    order_due: float
    """Time of the next search for files to order."""
    files: TableFiles = field(default_factory=TableFiles)
    version: int = -1
    """Version of the table when its files were last recorded."""
    left: int = 0
    """Number of files after the last compaction."""
    shortened: int = 0
    """The version when commits were removed last."""
    refused: str = ""
    """The last error, so that it is logged once."""
    too_large: int = 0
    """Number of partitions that were last too large to be ordered; also logged once."""


class TargetMaintenance:
    """The maintenance of one sink's targets by its one driver."""

    def __init__(self, settings: UpkeepSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings, self._clock = settings, clock
        self._turns: dict[str, _Turn] = {}
        """By URI, the longest waiting first."""
        self._pinned: list[tuple[str, Mapping[str, int], float]] = []
        self._rest_until = 0.0

    def pin(self, handle: str, versions: Mapping[str, int]) -> None:
        """Keep the files of these versions until the handle is released, at most for PINNED_FOR."""
        self._pinned.append((handle, versions, self._clock()))

    def release(self, handle: str) -> None:
        """Undo one pin; an unknown handle is ignored."""
        pinned = next((pinned for pinned in self._pinned if pinned[0] == handle), None)
        if pinned is not None:
            self._pinned.remove(pinned)

    def turn(self, cuts: Sequence[KeptCut], targets: Mapping[str, DeltaTarget]) -> None:
        """Maintain the next table of the newest cut, if it is due; called when no merge runs. Never raises.

        targets: the open targets, by URI; they are refreshed to the version that maintenance commits.
        """
        if not self._settings.every or not cuts:
            return
        self._add_turns(cuts[-1])
        began, uri = self._clock(), self._next()
        if uri is None:
            return
        turn, worked = self._turns[uri], True
        try:
            self._record_files(targets)
            worked = self._run_job(uri, turn, cuts, targets.get(uri))
        except Exception as exc:  # noqa: BLE001 - another client wrote, or the store does not answer: tried again
            turn.due = began + self._settings.every
            if (refused := f"{type(exc).__name__}: {str(exc)[:300]}") != turn.refused:
                turn.refused = refused
                log.warning("maintenance of a target failed", target=uri, reason=refused)
        if worked:
            self._rest_until = self._clock() + (self._clock() - began) * (SHARE - 1)

    def _add_turns(self, newest: KeptCut) -> None:
        """A turn for every target of the newest cut, and none for others."""
        present = dict.fromkeys(table.target for table in newest.record.tables.values() if table.version is not None)
        first = self._clock() + min(self._settings.every, FIRST_AFTER)
        kept = {uri: turn for uri, turn in self._turns.items() if uri in present}
        self._turns = kept | {uri: _Turn(first, first) for uri in present if uri not in kept}

    def _next(self) -> str | None:
        """The target that has waited longest; it moves to the end of the queue."""
        uri = next(iter(self._turns), None)
        if uri is not None:
            self._turns[uri] = self._turns.pop(uri)
        return uri

    def _record_files(self, targets: Mapping[str, DeltaTarget]) -> None:
        """Record the files that the tables have: a file that was in a table is not one of another client's commits."""
        for uri, target in targets.items():
            turn = self._turns.get(uri)
            if turn is not None and turn.version != target.version:
                turn.files.known |= paths_of(target.table)
                turn.version = target.version

    def _run_job(self, uri: str, turn: _Turn, cuts: Sequence[KeptCut], opened: DeltaTarget | None) -> bool:
        """Run the most urgent job of a table; whether there was one."""
        now = self._clock()
        rests = now < self._rest_until
        # delta-rs cannot compact a table to which it cannot commit
        count = 0 if opened is None or unsupported_features(opened.table) else opened.files()[0]
        many = count - turn.left
        if opened is not None and many > COMPACT_ABOVE and (not rests or many > URGENT * COMPACT_ABOVE):
            turn.left = count  # a table that cannot be compacted is tried again with as many files more
            turn.left = _compact(opened, self._settings.ordering)
        elif rests:
            return False
        elif opened is not None and self._is_long(opened, turn):
            remove_old_commits(uri, opened.version, self._listed(uri, cuts), kept=self._settings.keep_commits)
            turn.shortened = opened.version
        elif opened is not None and turn.order_due <= now and turn.order_due < turn.due and self._order(opened, turn):
            pass
        elif now < turn.due:
            return False
        elif (target := opened or DeltaTarget.open(uri)) is not None:
            left = self._remove(target, turn.files, cuts)
            turn.due = now if left else now + self._settings.every
        turn.refused = ""
        return True

    def _is_long(self, target: DeltaTarget, turn: _Turn) -> bool:
        return "://" not in target.uri and target.version - turn.shortened > self._settings.keep_commits

    def _order(self, target: DeltaTarget, turn: _Turn) -> bool:
        """Order one partition of a target; whether one was due. A failed one is tried again later."""
        ordering, turn.order_due = self._settings.ordering, self._clock() + self._settings.every
        if unsupported_features(target.table):
            return False
        if (large := len(ordering.too_large(target))) != turn.too_large:
            turn.too_large = large
            log.warning("partitions of a target are too large to be sorted", target=target.uri, parts=large)
        due = ordering.due(target)
        if not due:
            return False
        ordering.order(target, due[0])
        log.info("sorted rows of a target", target=target.uri, bytes=due[0].size, left=len(due) - 1)
        if len(due) > 1:
            turn.order_due = self._clock()
        return True

    def _remove(self, target: DeltaTarget, files: TableFiles, cuts: Sequence[KeptCut]) -> int:
        """Remove unused files; the number left for the next turn, 1 if that is not known yet."""
        now, after = self._clock(), self._settings.vacuum_after
        target.app_id  # noqa: B018 - raises for a table that is not ours
        _set_retention(target, self._settings)
        target.refresh()
        versions = self._listed(target.uri, cuts)
        kept = files.needed(versions, now, after, lambda version: paths_of(DeltaTable(target.uri, version=version)))
        if kept is None:
            return 1
        needed = kept | paths_of(target.table)
        store = pafs.PyFileSystem(DeltaStorageHandler(target.uri))
        present = dict(_data_files(store))
        if missing := needed.difference(present):
            raise DeltaError(f"{len(missing)} files of target {target.uri!r} are missing: no unused file is removed")
        if "://" in target.uri:
            present |= dict.fromkeys(expired_log_files(_names(store), min(versions)), UNKNOWN_FILE_AGE)
        else:
            remove_old_commits(target.uri, target.version, versions, kept=self._settings.keep_commits)
        gone = files.removable(present, needed, now, after)
        removed = self._remove_some(store, gone)
        if removed:
            log.info("removed unused files of a target", target=target.uri, files=removed, left=len(gone) - removed)
        return len(gone) - removed

    def _remove_some(self, store: pafs.FileSystem, paths: Sequence[str]) -> int:
        """Remove as many of the files as one turn allows; their number."""
        until = self._clock() + REMOVES_FOR
        for count, path in enumerate(paths[:AT_ONCE]):
            if self._clock() > until:
                return count
            hit("delta_upkeep_remove")
            _remove(store, path)
        return len(paths[:AT_ONCE])

    def _listed(self, uri: str, cuts: Sequence[KeptCut]) -> set[int]:
        """The versions of a target that cuts list or a handle pins."""
        # of tables that share a target the newest version counts, see Published.versions
        listed = {max(found) for cut in cuts if (found := _versions(cut, uri))}
        since = self._clock() - PINNED_FOR
        return listed | {versions[uri] for _, versions, at in tuple(self._pinned) if uri in versions and at > since}


def _versions(cut: KeptCut, uri: str) -> list[int]:
    tables = (table for table in cut.record.tables.values() if table.target == uri)
    return [table.version for table in tables if table.version is not None]


def _compact(target: DeltaTarget, ordering: ZOrdering) -> int:
    """Compact small files, and those of medium size when there are many; the number of files left.

    Files that ordering rewrites are not compacted here, which would undo their order.
    """
    target.table.optimize.compact(target_size=SMALL)
    hit("delta_upkeep_compacted")
    if target.files()[0] > COMPACT_ABOVE:
        large = [part.filters for part in ordering.too_large(target)]
        for filters in large if file_groups(target) else [None]:
            target.table.optimize.compact(partition_filters=filters)
    return target.files()[0]


def _set_retention(target: DeltaTarget, settings: UpkeepSettings) -> None:
    """Set the properties by which writers leave the log alone, and other clients keep removed files long enough."""
    if unsupported_features(target.table):
        return
    found = target.table.metadata().configuration
    wanted = {_OWN: "false"}
    if _GRACE not in found:
        hours = int(max(settings.retain, settings.vacuum_after) // 3600) + 1
        wanted[_GRACE] = f"interval {hours} hours"
    if any(found.get(name) != value for name, value in wanted.items()):
        target.table.alter.set_table_properties(wanted)


def _data_files(store: pafs.FileSystem, folder: str = "") -> Iterator[tuple[str, float]]:
    """Every Parquet file of the table and its age in seconds; not those of another table that is made below it."""
    infos = _files(store, folder)
    if folder and f"{folder}/_delta_log" in [info.path for info in infos]:
        return
    for info in infos:
        name = info.path.rpartition("/")[2]
        if name.startswith(("_", ".")) and not name.startswith(_PARTED):
            continue
        if info.type == pafs.FileType.Directory:
            yield from _data_files(store, info.path)
        elif info.path.endswith(".parquet"):
            yield info.path, time.time() - info.mtime.timestamp()


def _files(store: pafs.FileSystem, folder: str) -> list[Any]:
    return list(store.get_file_info(pafs.FileSelector(folder, allow_not_found=True)))


def _names(store: pafs.FileSystem) -> list[str]:
    return [info.path for info in _files(store, "_delta_log")]


def _remove(store: pafs.FileSystem, path: str) -> None:
    try:
        store.delete_file(path)
    except FileNotFoundError:
        return


@dataclass(frozen=True, slots=True)
class FileGroup:
    """The files of one partition, or of a whole table that has none."""

    values: tuple[tuple[str, str], ...]
    """Partition column → value, as Delta's log spells it; empty for NULL."""
    size: int
    """Bytes of its files."""
    fresh: int
    """Bytes of those that are younger than its last ordering."""
    youngest: int
    """When the last of its files was made; milliseconds since 1970."""

    @property
    def name(self) -> str:
        """Key in the target's property."""
        return json.dumps([value for _, value in self.values], ensure_ascii=False)

    @property
    def filters(self) -> list[tuple[str, str, str]] | None:
        """Partition filters for delta-rs; None for the whole table."""
        return [(column, "=", value) for column, value in self.values] or None


def file_groups(target: DeltaTarget) -> list[FileGroup]:
    """The file groups of a target with cluster_by; none if it has too many partitions or not these columns."""
    if not target.cluster_by or not set(target.cluster_by) <= set(target.columns.names):
        return []
    actions = pa.table(target.table.get_add_actions(flatten=True))
    columns = target.table.metadata().partition_columns
    chosen = ["size_bytes", "modification_time", *(f"partition.{name}" for name in columns)]
    files: dict[tuple[tuple[str, str], ...], list[tuple[int, int]]] = {}
    for file in actions.select(chosen).to_pylist():
        values = tuple((name, partition_text(file[f"partition.{name}"]) or "") for name in columns)
        files.setdefault(values, []).append((file["size_bytes"], file["modification_time"]))
    upto = _noted(target)
    return [] if len(files) > MAX_PARTS else [_part(values, found, upto) for values, found in files.items()]


def _part(values: tuple[tuple[str, str], ...], files: Sequence[tuple[int, int]], upto: Mapping[str, int]) -> FileGroup:
    part = FileGroup(values, sum(size for size, _ in files), 0, max(made for _, made in files))
    last = upto.get(part.name, 0)
    return FileGroup(part.values, part.size, sum(size for size, made in files if made > last), part.youngest)


def _noted(target: DeltaTarget) -> dict[str, int]:
    """Group → time of the newest file after the last ordering by these columns."""
    said = json.loads(target.table.metadata().configuration.get(ORDERED) or "{}")
    return dict(said["upto"]) if said.get("by") == list(target.cluster_by) else {}
