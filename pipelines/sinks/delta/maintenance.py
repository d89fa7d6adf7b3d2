"""Maintenance of a Delta sink's targets: merging small files, dropping deleted rows, sorting rows (Z-order), removing
unused files and old commits.

The sink calls `TargetMaintenance.turn` after each publish, when no merge runs, so that each target still has a single
writer. A call does at most one job on one target. Maintenance takes at most about a tenth of the time. Files of targets
of the indexed writer are rewritten in the background (background_rewriter.py); a call then only commits the result.
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

from cdc.delta_protocol.checkpoint_rows import RETENTION
from cdc.delta_protocol.deletion_vectors import FOLDER as VECTORS
from cdc.failpoint import hit
from cdc.target_names import RELATION_COLUMN
from cdc.targets.cut_retention import KEEP_ALL_FOR
from pipelines.sinks.delta.background_rewriter import MERGE_ABOVE, SMALL, BackgroundRewriter
from pipelines.sinks.delta.commit_sync import sync_commits
from pipelines.sinks.delta.delta_log_cleanup import (
    data_paths_of,
    expired_log_files,
    paths_of,
    remove_old_commits,
)
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.indexed.delta_log import RECENT
from pipelines.sinks.delta.published_cuts_table import KeptCut
from pipelines.sinks.delta.target_layout import partition_text

COMPACT_ABOVE: Final = 64
"""Number of new files after which a target needs an OPTIMIZE. Each merge adds a file and opens all files of the target,
so merges become slower with every new file.
"""
URGENT: Final = 4
"""Multiple of COMPACT_ABOVE. A target with more new files gets its OPTIMIZE even if maintenance has used its share of
the time.
"""
SHARE: Final = 10
"""Maintenance may use 1/SHARE of the time. After each job it waits as long as that limit requires."""
PINNED_FOR: Final = 86_400.0
"""Seconds after which a pin of versions expires, because the reader that pinned them was probably killed."""
FIRST_AFTER: Final = 60.0
"""Maximum seconds from this process's first publish of a target to its first search for unused files of that target."""
AT_ONCE: Final = 1_000
"""Maximum number of unused files that one call of `turn` removes; later calls remove the rest."""
REMOVES_FOR: Final = 1.0
"""Seconds after which one call of `turn` stops removing files. An object store needs several seconds for a thousand
files.
"""

READ_AT_ONCE: Final = 20
"""Maximum number of table versions whose lists of files one call of `turn` reads; each takes about 20 ms."""
UNKNOWN_FILE_AGE: Final = 86_400.0
"""Age in seconds at which an unused file that no known version contained may be removed. A younger one may belong to a
commit that another client has not made yet.
"""

ORDERED: Final = "cdc.ordered"
"""Name of a target's property with JSON about its last sorting. `by` has the columns. `upto` maps each file group to
the time of its newest file when the group was last sorted.
"""
MAX_PARTS: Final = 1_000
"""Maximum number of partitions of a target that is sorted, because the property ORDERED names each partition."""
MEMORY: Final = 256 << 20
"""Maximum bytes of memory for sorting one file group; further rows are spilled to disk. Wide rows may need more."""

_PARTED: Final = f"{RELATION_COLUMN}="
"""Prefix of the name of a partition directory in a shared target. Other directories with a leading underscore are not
searched for data files.
"""
_OWN: Final = "delta.enableExpiredLogCleanup"

log = structlog.get_logger("upkeep")


@dataclass(frozen=True, slots=True)
class ZOrdering:
    """The sizes that decide which file groups of a target are sorted. A file group has the files of one partition."""

    least: int = 16 << 20
    """Minimum bytes of a group that is sorted. A smaller group has one or two files, so queries could not skip any of
    them.
    """
    most: int = 128 << 20
    """Maximum bytes of a group that is sorted. The merges of the sink wait while a group is sorted, about a second per
    15 MiB.
    """
    file: int = 32 << 20
    """Bytes that a sorted file should have. This exceeds SMALL, so that the first step of OPTIMIZE does not rewrite
    sorted files.
    """
    fresh: int = 4
    """Divisor of the group's size: a group is sorted when at least 1/fresh of its bytes are not sorted yet."""

    def due(self, target: DeltaTarget) -> list[FileGroup]:
        """Return the file groups of a target that need sorting; the group with the most unsorted bytes is first."""
        found = [part for part in file_groups(target) if self.least <= part.size <= self.most]
        ripe = [part for part in found if part.fresh * self.fresh >= part.size]
        return sorted(ripe, key=lambda part: -part.fresh)

    def too_large(self, target: DeltaTarget) -> list[FileGroup]:
        """Return the file groups of a target that are too large to be sorted."""
        return [part for part in file_groups(target) if part.size > self.most]

    def order(self, target: DeltaTarget, part: FileGroup) -> None:
        """Sort the rows of one file group, then record that in the target's property ORDERED.

        After a kill between the two steps, the group is sorted again.
        """
        target.table.optimize.z_order(
            target.cluster_by, partition_filters=part.filters, target_size=self.file, max_spill_size=MEMORY
        )
        hit("delta_upkeep_ordered")
        upto, now = _noted(target), {found.name: found.youngest for found in file_groups(target)}
        upto = {name: made for name, made in upto.items() if name in now} | {part.name: now[part.name]}
        said = json.dumps({"by": target.cluster_by, "upto": upto})
        target.set_property(ORDERED, said)


@dataclass(frozen=True, slots=True)
class UpkeepSettings:
    """How long a sink keeps its cuts, and when its targets are maintained; times in seconds."""

    every: float = 300.0
    """Interval between two searches for unused files in one target; 0 switches all maintenance off."""
    vacuum_after: float = 3600.0
    """Time for which an unused file stays. A file is unused if neither the newest version nor a kept cut needs it."""
    retain: float = 86400.0
    """Time for which published cuts are kept."""
    keep_commits: int = 100
    """Number of newest commits that stay in the `_delta_log` of a target in a local directory."""
    brief: float = 3.0 * KEEP_ALL_FOR
    """Age up to which the cuts of a version get no checkpoint. Every cut is kept for KEEP_ALL_FOR seconds, and most are
    dropped soon after."""
    ordering: ZOrdering = field(default_factory=ZOrdering)
    """Sizes that decide which file groups of a target with `cluster_by` are sorted."""


@dataclass(slots=True)
class TableFiles:
    """Finds the files of one target that may be removed, and remembers for how long this process has seen each file
    unused.

    A file is unused if neither the newest version nor a version of a kept cut contains it. It may be removed once it
    was unused for some time without interruption. That time is only in memory, so a new process counts from zero.

    A file that this process never saw in the table is removed only if it is also a day old, or was seen unused for a
    day, because the clock of the machine that wrote it may be ahead. A younger file may belong to a commit that another
    client has not made yet. An older one was probably left by a killed writer.
    """

    marks: dict[str, float] = field(default_factory=dict)
    """Unused file → clock time at which this process first found it unused."""
    seen: dict[int, float] = field(default_factory=dict)
    """Version that a kept cut names → clock time at which this process first found it in a kept cut."""
    read: dict[int, frozenset[str]] = field(default_factory=dict)
    """Version → the files that it contains; the files of a version never change."""
    known: set[str] = field(default_factory=set)
    """Files that this process saw in the table, in its newest version at some time or in a version of a kept cut."""

    def needed(
        self, listed: Iterable[int], now: float, after: float, files_of: Callable[[int], frozenset[str]]
    ) -> frozenset[str] | None:
        """Return the files that kept cuts need; None if more calls are needed to read their versions.

        listed: the versions that kept cuts name. after: seconds for which unused files stay. files_of: function that
        reads the files of a version. One call reads at most READ_AT_ONCE versions. A version is left out until it has
        been listed for half of `after`. Before that, none of its files has been unused for long enough to be removed.
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
        """Return the files that may be removed, because they have been unused for at least `after` seconds.

        Also updates `marks`. present: file → its age in seconds. needed: the files that are in use.
        """
        self.marks = {path: self.marks.get(path, now) for path in present if path not in needed}
        self.known &= present.keys()
        return sorted(
            path
            for path, since in self.marks.items()
            if now - since >= after and (path in self.known or max(present[path], now - since) >= UNKNOWN_FILE_AGE)
        )


@dataclass(slots=True)
class _Turn:
    """The state of the maintenance of one target."""

    due: float
    """Clock time of the next search for unused files."""
    order_due: float
    """Clock time of the next search for file groups that need sorting."""
    purge_due: float
    """Clock time of the next search for data files with many deleted rows."""
    rewrite_due: float = 0.0
    """Clock time before which no files are rewritten in the background, because the last rewrite failed."""
    files: TableFiles = field(default_factory=TableFiles)
    version: int = -1
    """Version of the table at which its files were last added to `files.known`."""
    left: int = 0
    """Number of files after the last OPTIMIZE."""
    shortened: int = 0
    """Version of the table at which old commits were last removed from its `_delta_log`."""
    refused: str = ""
    """The last error of this target, so that a repeated error is not logged again."""
    too_large: int = 0
    """Number of file groups that were too large to be sorted at the last check; a change of the number is logged."""


class TargetMaintenance:
    """The maintenance of all targets of one sink, in the driver that fills the sink."""

    def __init__(
        self,
        settings: UpkeepSettings,
        clock: Callable[[], float] = time.monotonic,
        rewriter: BackgroundRewriter | None = None,
    ) -> None:
        """rewriter: rewrites files of the targets that the indexed writer has open; None: there are no such targets."""
        self._settings, self._clock, self._rewriter = settings, clock, rewriter
        self._turns: dict[str, _Turn] = {}
        """Target URI → state of its maintenance; the target that has waited longest is first."""
        self._pinned: list[tuple[str, Mapping[str, int], float]] = []
        self._rest_until = 0.0

    def pin(self, handle: str, versions: Mapping[str, int]) -> None:
        """Keep the files of some versions until the handle is released, for at most PINNED_FOR seconds.

        versions: target URI → version.
        """
        self._pinned.append((handle, versions, self._clock()))

    def release(self, handle: str) -> None:
        """Remove one pin with this handle; an unknown handle is ignored."""
        pinned = next((pinned for pinned in self._pinned if pinned[0] == handle), None)
        if pinned is not None:
            self._pinned.remove(pinned)

    def turn(self, cuts: Sequence[KeptCut], targets: Mapping[str, DeltaTarget]) -> None:
        """Do at most one job, on the target that has waited longest. Never raises; errors are logged.

        Only targets in the newest cut get jobs. The caller makes sure that no merge runs. A job that commits to an open
        target also updates that DeltaTarget to the new version. cuts: the kept cuts, newest last. targets: URI → open
        target.
        """
        if not self._settings.every or not cuts:
            return
        self._add_turns(cuts[-1])
        rewritten = None if self._rewriter is None else self._rewriter.rewritten
        began, uri = self._clock(), rewritten if rewritten in self._turns else self._next()
        if uri is None:
            return
        turn, worked = self._turns[uri], True
        try:
            self._record_files(targets)
            if self._rewriter is not None and rewritten is not None and self._finish(self._rewriter, targets, turn):
                return
            worked = self._run_job(uri, turn, cuts, targets.get(uri))
        except Exception as exc:  # noqa: BLE001 - another client wrote, or the store does not answer: tried again
            turn.due = began + self._settings.every
            if (refused := f"{type(exc).__name__}: {str(exc)[:300]}") != turn.refused:
                turn.refused = refused
                log.warning(
                    "maintenance of a target failed; its small and unused files stay until a later attempt succeeds",
                    target=uri,
                    reason=refused,
                )
        if worked:
            self._rest_until = self._clock() + (self._clock() - began) * (SHARE - 1)

    def _add_turns(self, newest: KeptCut) -> None:
        """Create the maintenance state for each new target of the newest cut; remove the state of targets that are not
        in it.
        """
        present = dict.fromkeys(table.target for table in newest.record.tables.values() if table.version is not None)
        first = self._clock() + min(self._settings.every, FIRST_AFTER)
        kept = {uri: turn for uri, turn in self._turns.items() if uri in present}
        self._turns = kept | {uri: _Turn(first, first, first) for uri in present if uri not in kept}

    def _next(self) -> str | None:
        """Return the URI of the target that has waited longest, and move it to the end of the queue.

        Returns None if there are no targets.
        """
        uri = next(iter(self._turns), None)
        if uri is not None:
            self._turns[uri] = self._turns.pop(uri)
        return uri

    def _record_files(self, targets: Mapping[str, DeltaTarget]) -> None:
        """Record the files that the open targets contain now, so that they later count as files seen in the table."""
        for uri, target in targets.items():
            turn = self._turns.get(uri)
            if turn is not None and turn.version != target.version:
                known = self._known_paths(target)
                turn.files.known |= data_paths_of(target.table) if known is None else known
                turn.version = target.version

    def _known_paths(self, target: DeltaTarget) -> frozenset[str] | None:
        """Return the paths of the live data files of a target; None if no open indexed table is at its version."""
        return None if self._rewriter is None else self._rewriter.data_paths(target)

    def _run_job(self, uri: str, turn: _Turn, cuts: Sequence[KeptCut], opened: DeltaTarget | None) -> bool:
        """Run the most urgent job on one target; return whether a job was run."""
        now = self._clock()
        if opened is not None:
            opened.current.check_directory()
        rests = now < self._rest_until
        count = 0 if opened is None else self._count(opened)
        many = count - turn.left
        if opened is not None and self._rewriter is not None and self._rewriter.rewrites(opened):
            if self._start_rewrite(self._rewriter, opened, turn, many):
                return False
        elif opened is not None and many > COMPACT_ABOVE and (not rests or many > URGENT * COMPACT_ABOVE):
            turn.left = count  # if OPTIMIZE fails, the next attempt follows after as many new files
            turn.left = _compact(opened, self._settings.ordering)
            turn.refused = ""
            return True
        if rests:
            return False
        if opened is not None and self._is_long(opened, turn):
            self._shorten_log(opened, cuts)
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

    def _count(self, target: DeltaTarget) -> int:
        """Return the number of data files of a target; 0 if no writer can compact them."""
        if (known := self._known_paths(target)) is not None:
            return len(known)
        # delta-rs cannot run OPTIMIZE on a table to which it cannot commit
        return 0 if target.unwritable_features else target.files()[0]

    def _is_long(self, target: DeltaTarget, turn: _Turn) -> bool:
        return "://" not in target.uri and target.version - turn.shortened > self._settings.keep_commits

    def _start_rewrite(self, rewriter: BackgroundRewriter, target: DeltaTarget, turn: _Turn, many: int) -> bool:
        """Start to rewrite files of the target in the background if that is due; return whether that was started.

        many: number of files added since the last call that found no small files to merge. If this number is very large
        and the rewriter is busy with this target, the call waits for the rewrite and commits the new file.
        """
        if rewriter.is_busy():
            if many > URGENT * COMPACT_ABOVE and rewriter.is_busy(target.uri):
                self._finish(rewriter, {target.uri: target}, turn, wait=True)
            return False
        if turn.rewrite_due > self._clock():
            return False
        if many > MERGE_ABOVE:
            if rewriter.start_merge_of_small_files(target):
                return True
            turn.left += many
        if turn.purge_due > self._clock():
            return False
        if rewriter.start_purge(target):
            return True
        turn.purge_due = self._clock() + self._settings.every
        return False

    def _finish(
        self, rewriter: BackgroundRewriter, targets: Mapping[str, DeltaTarget], turn: _Turn, *, wait: bool = False
    ) -> bool:
        """Commit a rewritten file; return whether that was done. After an error, no rewrite of this target starts for
        `UpkeepSettings.every` seconds.
        """
        turn.rewrite_due = self._clock() + self._settings.every
        done = rewriter.finish(targets, wait=wait)
        turn.rewrite_due = 0.0
        return done

    def _order(self, target: DeltaTarget, turn: _Turn) -> bool:
        """Sort the file group with the most unsorted bytes; return whether a group needed sorting.

        After an error, the next attempt follows `UpkeepSettings.every` seconds later.
        """
        ordering, turn.order_due = self._settings.ordering, self._clock() + self._settings.every
        if target.unwritable_features:
            return False
        if (large := len(ordering.too_large(target))) != turn.too_large:
            turn.too_large = large
            log.warning(
                "maintenance does not sort partitions that are too large; queries read more files of these partitions",
                target=target.uri,
                partitions=large,
            )
        due = ordering.due(target)
        if not due:
            return False
        ordering.order(target, due[0])
        log.info("maintenance sorted rows of a target", target=target.uri, bytes=due[0].size, groups_left=len(due) - 1)
        if len(due) > 1:
            turn.order_due = self._clock()
        return True

    def _remove(self, target: DeltaTarget, files: TableFiles, cuts: Sequence[KeptCut]) -> int:
        """Remove unused files of a target; return how many are left for later calls.

        Returns 1 if the file lists of some versions were not read yet.
        """
        now, after = self._clock(), self._settings.vacuum_after
        target.app_id  # noqa: B018 - raises for a table that is not ours
        _set_retention(target, self._settings)
        target.refresh()
        # files may go only once the commits that replaced them are on the disk
        sync_commits(target.uri, cuts[-1].record.versions.get(target.uri, -1), target.version)
        versions = self._listed(target.uri, cuts)
        kept = files.needed(versions, now, after, lambda version: paths_of(DeltaTable(target.uri, version=version)))
        if kept is None:
            return 1
        needed = kept | paths_of(target.table)
        store = pafs.PyFileSystem(DeltaStorageHandler(target.uri))
        present = dict(_data_files(store))
        files.known |= {path for path in present if path.startswith(f"{VECTORS}/")}
        if missing := needed.difference(present):
            raise DeltaError(
                f"cannot remove unused files of target {target.uri!r}: {len(missing)} needed files are missing"
            )
        if "://" in target.uri:
            present |= dict.fromkeys(expired_log_files(_names(store), min(versions)), UNKNOWN_FILE_AGE)
        else:
            self._shorten_log(target, cuts)
        gone = files.removable(present, needed, now, after)
        removed = self._remove_some(store, gone)
        if removed:
            log.info(
                "maintenance deleted unused files of a target",
                target=target.uri,
                files=removed,
                files_left=len(gone) - removed,
            )
        return len(gone) - removed

    def _shorten_log(self, target: DeltaTarget, cuts: Sequence[KeptCut]) -> None:
        since = (cuts[-1].published_at if cuts else 0) - self._settings.brief * 1e6
        listed = self._listed(target.uri, cuts)
        brief = listed - self._listed(target.uri, [cut for cut in cuts if cut.published_at < since])
        remove_old_commits(target.uri, target.version, listed, kept=self._settings.keep_commits, brief=brief)

    def _remove_some(self, store: pafs.FileSystem, paths: Sequence[str]) -> int:
        """Remove as many of the files as one call allows; return how many were removed."""
        until = self._clock() + REMOVES_FOR
        for count, path in enumerate(paths[:AT_ONCE]):
            if self._clock() > until:
                return count
            hit("delta_upkeep_remove")
            _remove(store, path)
        return len(paths[:AT_ONCE])

    def _listed(self, uri: str, cuts: Sequence[KeptCut]) -> set[int]:
        """Return the versions of a target that are pinned or belong to a kept cut."""
        # for a shared target the newest version of its tables counts, see Published.versions
        listed = {max(found) for cut in cuts if (found := _versions(cut, uri))}
        since = self._clock() - PINNED_FOR
        return listed | {versions[uri] for _, versions, at in tuple(self._pinned) if uri in versions and at > since}


def _versions(cut: KeptCut, uri: str) -> list[int]:
    tables = (table for table in cut.record.tables.values() if table.target == uri)
    return [table.version for table in tables if table.version is not None]


def _compact(target: DeltaTarget, ordering: ZOrdering) -> int:
    """Merge small files with OPTIMIZE, and also larger files if there are many; return the number of files left.

    Larger files of a file group that is small enough to be sorted are not merged: OPTIMIZE would undo the sorting.
    """
    target.table.optimize.compact(target_size=SMALL)
    hit("delta_upkeep_compacted")
    if target.files()[0] > COMPACT_ABOVE:
        large = [part.filters for part in ordering.too_large(target)]
        for filters in large if file_groups(target) else [None]:
            target.table.optimize.compact(partition_filters=filters)
    return target.files()[0]


def _set_retention(target: DeltaTarget, settings: UpkeepSettings) -> None:
    """Set properties of a target, so that other clients do not remove files too early.

    Another writer then does not clean up the `_delta_log` of the target, and a VACUUM by another client spares recently
    removed files. If the target already has a retention of removed files, this retention stays as it is.
    """
    if target.unwritable_features:
        return
    found = target.table.metadata().configuration
    wanted = {_OWN: "false"}
    if RETENTION not in found:
        hours = int((max(settings.retain, settings.vacuum_after) + RECENT) // 3600) + 1
        wanted[RETENTION] = f"interval {hours} hours"
    if any(found.get(name) != value for name, value in wanted.items()):
        target.set_properties(wanted)


def _data_files(store: pafs.FileSystem, folder: str = "") -> Iterator[tuple[str, float]]:
    """Yield the path and the age in seconds of each data file and file of deletion vectors below a folder of the table.

    A subfolder that is itself a Delta table is skipped.
    """
    infos = _files(store, folder)
    if folder and f"{folder}/_delta_log" in [info.path for info in infos]:
        return
    for info in infos:
        name = info.path.rpartition("/")[2]
        if name.startswith(("_", ".")) and not (name.startswith(_PARTED) or info.path == VECTORS):
            continue
        if info.type == pafs.FileType.Directory:
            yield from _data_files(store, info.path)
        elif info.path.endswith((".parquet", ".bin")):
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
    """The data files of one partition; of the whole table if it has no partitions."""

    values: tuple[tuple[str, str], ...]
    """(partition column, value) pairs, with values as `_delta_log` spells them; an empty text for NULL."""
    size: int
    """Total bytes of the group's files."""
    fresh: int
    """Bytes of the group's files that were written after its last sorting."""
    youngest: int
    """Time at which the newest file of the group was written; milliseconds since 1970."""

    @property
    def name(self) -> str:
        """Key of the group in the target's property ORDERED."""
        return json.dumps([value for _, value in self.values], ensure_ascii=False)

    @property
    def filters(self) -> list[tuple[str, str, str]] | None:
        """The filters that select the group in delta-rs; None for a table without partitions."""
        return [(column, "=", value) for column, value in self.values] or None


def file_groups(target: DeltaTarget) -> list[FileGroup]:
    """Return the file groups of a target with `cluster_by`.

    The list is empty if the target has no `cluster_by`, does not have all columns that `cluster_by` names, or has more
    than MAX_PARTS partitions.
    """
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
    """Return file group → time of its newest file when the group was last sorted by `target.cluster_by`."""
    said = json.loads(target.table.metadata().configuration.get(ORDERED) or "{}")
    return dict(said["upto"]) if said.get("by") == list(target.cluster_by) else {}
