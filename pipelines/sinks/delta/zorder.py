"""Z-order: rows of a target's files ordered by the columns of cluster_by, one file group at a time.

A file group is a partition, or the whole table where it has none: delta-rs reorders all its files at once. A file that
is younger than the last ordering of its group was written by the stream. A group is rewritten once a quarter of it is
that young, so at most four bytes are rewritten for each byte of the stream.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.failpoint import hit
from pipelines.sinks.delta.table import DeltaTarget
from pipelines.sinks.delta.table_layout import partition_text

ORDERED: Final = "cdc.ordered"
"""Property of a target, JSON: `by`, the columns of its last ordering; `upto`, group → time of its newest file."""
MAX_PARTS: Final = 1_000
"""Partitions above which a target is not ordered: the property names each."""
MEMORY: Final = 256 << 20
"""Bytes of memory for the sort of a group, without its widest rows; more is spilled to disk."""


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
