"""Records of removed files, which left a table by a commit and stay on disk for readers of older versions.

The record is written before the commit, so a killed writer leaves no file without a record. The record has no effect
while the files are still in the table. The grace period starts when a vacuum first finds that the files have left the
table, which is never before the commit.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Final, Self

from cdc import atomic_file
from cdc.boot_clock import BootTimestamp
from cdc.bucket_files import Root, as_root
from cdc.errors import LogCorrupt
from cdc.log.disk_format import CHANGES, COMPACTED, segment_of

FOLDER: Final = "_leaving"
"""Name of the folder under the log's root that contains the records."""

_DATA_FILE: Final = re.compile(r"segment=\d+/[^/]+\.parquet\Z")


@dataclass(frozen=True, slots=True)
class RemovedFiles:
    """Record of the data files that one commit removes from a table."""

    table: str
    """Name of the table, which is also its directory under the log's root."""
    version: int
    """Version of the table that the commit creates; this version no longer contains the files."""
    paths: tuple[str, ...]
    """Paths of the files relative to the table's directory."""
    seen_at: int | None = None
    """Time in microseconds UTC at which a vacuum first found that the files had left the table; None before."""
    size: int = 0
    """Total size of the files in bytes; 0 in records that an older version of cdc wrote."""
    boot: str = ""
    """Boot id of the machine that set `seen_at`; `up_us` counts from that boot (`cdc.boot_clock`)."""
    up_us: int = 0

    def __post_init__(self) -> None:
        if self.table not in {CHANGES, COMPACTED} or not all(map(_DATA_FILE.match, self.paths)):
            raise ValueError(
                f"a removal record of table {self.table!r} is invalid: expected a table of the log and its data files"
            )

    @classmethod
    def read(cls, path: Root) -> Self | None:
        """Read a record from a file; None if the file does not exist. Raises LogCorrupt if the file cannot be read."""
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            seen = fields["seen_at"]
            return cls(
                table=str(fields["table"]),
                version=int(fields["version"]),
                paths=tuple(map(str, fields["paths"])),
                seen_at=None if seen is None else int(seen),
                size=int(fields.get("size", 0)),
                boot=str(fields.get("boot", "")),
                up_us=int(fields.get("up_us", 0)),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as exc:
            raise LogCorrupt(f"record {path.name!r} in the log's folder {FOLDER!r} cannot be read") from exc

    def write(self, path: Root) -> None:
        """Write the record to a file; the file is durable when the method returns."""
        atomic_file.replace(path, json.dumps(asdict(self)).encode())

    def seen(self, now: BootTimestamp) -> Self:
        """Return a copy of the record with `now` as the start of the grace period."""
        return replace(self, seen_at=now.clock_us, boot=now.boot, up_us=now.up_us)

    def age_us(self, now: BootTimestamp) -> int:
        """Return the microseconds from the time when a vacuum first found that the files had left the table.

        Return 0 if no vacuum has found this yet.
        """
        return 0 if self.seen_at is None else now.since(BootTimestamp(self.seen_at, self.boot, self.up_us))


def record_removal(root: Root, table: str, files: Mapping[str, int], version: int) -> None:
    """Record that the next commit of a table removes these files (path → bytes) and creates `version`."""
    if not files:
        return
    folder = root / FOLDER
    if not folder.is_dir():
        folder.mkdir(exist_ok=True)
        atomic_file.sync(root)
    RemovedFiles(table, version, tuple(files), size=sum(files.values())).write(folder / f"{uuid.uuid4().hex}.json")


def list_removals(root: str | Root) -> dict[Root, RemovedFiles]:
    """Return all records of removed files of the log under `root`: path of the record → record."""
    files: list[Root] = sorted((as_root(root) / FOLDER).glob("[!.]*.json"), key=str)
    return {file: found for file in files if (found := RemovedFiles.read(file)) is not None}


def segments_with_removed_files(root: Root, table: str) -> set[int]:
    """Return the numbers of the partitions of a table that contain removed files."""
    return {segment_of(path) for found in list_removals(root).values() if found.table == table for path in found.paths}
