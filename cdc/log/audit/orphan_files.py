"""Orphan files in the log's directories: no table version, removal record or writer needs them.

What a writer has staged is younger than its table's latest commit, or a rewrite that takes some minutes at most; what
left a table stands in a note. The rest nobody will ever ask for.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from cdc.log import removed_files
from cdc.log.audit.finding import AuditFinding, DamageKind
from cdc.log.layout import CHANGES, COMPACTED
from cdc.log.object_path import Root
from cdc.log.storage import is_table, last_commit_info, open_table
from cdc.log.vacuum import VacuumResult

NAMED: Final = 100
"""Maximum number of orphan files that findings list one by one."""
LEAST: Final = 600.0
"""Minimum age in seconds of an orphan file, whatever the grace."""
_SEGMENT: Final = re.compile(r"segment=\d+\Z")
_SECOND: Final = 1_000_000_000
"""Nanoseconds."""


@dataclass(frozen=True, slots=True)
class OrphanFile:
    """A file that nothing refers to."""

    name: str
    """Relative to the log's root."""
    size: int
    """Bytes."""


def find_orphan_files(root: Root, grace: float) -> list[OrphanFile]:
    """The orphan files of both tables that are older than the grace (seconds), by name."""
    found = _found(root, grace)
    named = (OrphanFile(f"{place.parent.parent.name}/{place.parent.name}/{place.name}", size) for place, size in found)
    return sorted(named, key=lambda stray: stray.name)


def orphan_findings(found: Sequence[OrphanFile]) -> Iterator[AuditFinding]:
    """Findings for the orphan files, at most NAMED one by one."""
    for stray in found[:NAMED]:
        message = f"{stray.size:,} bytes that no commit names"
        yield AuditFinding(
            damage=DamageKind.FOREIGN, message=message, file=stray.name, remedy="'cdc log gc' removes it"
        )
    if len(found) > NAMED:
        message = f"{len(found) - NAMED:,} more files that no commit names"
        yield AuditFinding(damage=DamageKind.FOREIGN, message=message, remedy="'cdc log gc' removes them")


def remove_orphan_files(root: Root, grace: float, *, dry_run: bool = False) -> VacuumResult:
    """Delete orphan files and return their count and bytes; a dry run only counts them."""
    files = size = 0
    for place, length in _found(root, grace):
        if not dry_run:
            place.unlink(missing_ok=True)
            with suppress(OSError):  # other files are in it
                place.parent.rmdir()
        files, size = files + 1, size + length
    return VacuumResult(files, size)


def _found(root: Root, grace: float) -> Iterator[tuple[Root, int]]:
    for name in (CHANGES, COMPACTED):
        path = root / name
        if not is_table(path):
            continue
        table = open_table(path)
        held = set(pa.table(table.get_add_actions())["path"].to_pylist())
        # read behind the table: what left it later is in its version still
        noted = {
            file for note in removed_files.list_removals(root).values() if note.table == name for file in note.paths
        }
        committed = int(last_commit_info(path, table)["timestamp"]) * 1_000_000
        # the grace is also for clocks that disagree
        before = min(committed, time.time_ns()) - int(max(grace, LEAST) * _SECOND)
        for folder in path.iterdir():
            if not _SEGMENT.match(folder.name):
                continue
            for place in folder.iterdir():
                relative = f"{folder.name}/{place.name}"
                if relative in held or relative in noted or place.name.startswith("."):
                    continue
                with suppress(FileNotFoundError):
                    stat = place.stat()
                    if stat.st_mtime_ns < before:
                        yield place, stat.st_size
