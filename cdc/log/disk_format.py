"""On-disk format of the log: table names, table properties, commit metadata, file statistics.

Writers and readers share these definitions. This module does no I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import LogFormatUnknown
from cdc.log_row import LOG_SCHEMA, Operation
from cdc.lsn import Lsn
from cdc.position import Position

FORMAT: Final = 3
"""Version of the log's format that this version of cdc writes.

A log with a higher number is refused. A log with a lower number can be read; `cdc migrate log` makes it writable. Since
format 2 every page of a data file has a checksum. Since format 3 the key of a message has its prefix, kind and LSN.
"""

CHANGES: Final = "changes"
"""Name of the table with every change, in commit order."""

COMPACTED: Final = "compacted"
"""Name of the table with the latest state of each key up to the horizon."""

TABLE_SCHEMA: Final = LOG_SCHEMA.append(pa.field("segment", pa.int32(), nullable=False))
"""Columns of both Delta tables: those of a log row, and the partition column `segment`."""

ORDER: Final = [("relation", "ascending"), ("position", "ascending"), ("ordinal", "ascending")]
"""Sort keys of the rows in a data file.

The key of the changed row is not a sort key, although lookups of a key would then be slightly faster. The order by
position lets a reader of late positions skip row groups, and makes integer columns compress to a fraction of the size.
"""

STATISTICS: Final = ("position", "ordinal", "relation", "op", "partial", "committed_at")
"""Columns whose minimum and maximum are in the `_delta_log`. Readers use these values to exclude files."""

PARQUET: Final[dict[str, Any]] = {
    "compression": "lz4",
    "use_dictionary": ["relation", "topic", "op", "partial"],
    # small differences, as the rows are in order of position: a log of small rows needs little more than half the bytes
    "column_encoding": dict.fromkeys(("position", "ordinal", "xid", "committed_at"), "DELTA_BINARY_PACKED"),
    # only those by which a reader, ours or another, excludes row groups: others take room in the footer, and those of
    # images a tenth of the writing time
    "write_statistics": ["position", "ordinal", "committed_at", "relation", "topic"],
    # a read detects a flipped byte; the cost is not measurable in an append
    "write_page_checksum": True,
    # the allocator maps and unmaps each larger page separately, which is slow
    "data_page_size": 1 << 18,
}
"""Options with which pyarrow writes every Parquet file of the log."""

GROUP: Final = 16_384
"""Number of rows in a row group.

A reader always reads whole row groups, even if it needs only one of many tables, or a short range. The
description of a group needs 1,400 bytes in the footer, less than 0.3 % of the size of the group.
"""
SMALL_GROUP: Final = 4_096
"""Number of rows in a row group of a file with many relations.

A file has many relations if it has more relations than it would have groups of GROUP rows. Small groups make such a
file 2 % larger, but reading one table needs only a quarter of the bytes.
"""

PROPERTIES: Final[Mapping[str, str]] = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.checkpointInterval": "100",
    # A reader that is a few minutes behind starts at a checkpoint; older commit files only slow down listings.
    "delta.logRetentionDuration": "interval 10 minutes",
    "delta.enableExpiredLogCleanup": "true",
    # Checkpoints name removed files this long. Rewrites remove thousands of files, and vacuum has its own records.
    "delta.deletedFileRetentionDuration": "interval 1 minute",
}


class FilePath(Protocol):
    """A path on a disk or in an object store."""

    def __truediv__(self, below: str, /) -> Self: ...


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """The source database of a log, recorded in the description of the Delta tables when the log is created."""

    system_id: str
    """System identifier of the source cluster (`IDENTIFY_SYSTEM`)."""
    database: str

    def to_description(self) -> str:
        """Return the description of the Delta table: JSON with the format and this identity."""
        return json.dumps({"format": FORMAT, "system_id": self.system_id, "database": self.database})

    @classmethod
    def from_description(cls, text: str) -> Self:
        """Parse the description of a Delta table.

        Raises LogFormatUnknown for a newer format, or for a table that is not part of a change log.
        """
        format_of(text)
        fields = json.loads(text)
        return cls(system_id=fields["system_id"], database=fields["database"])


def format_of(description: str) -> int:
    """Return the format number in a table's description.

    Raises LogFormatUnknown if the description has no format number, or one that this version of cdc does not support.
    """
    try:
        found = json.loads(description)["format"]
    except (ValueError, KeyError, TypeError) as exc:
        raise LogFormatUnknown("the table is not part of a change log: its description has no format") from exc
    if not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise LogFormatUnknown(
            f"this version of cdc supports log formats 1 to {FORMAT}, but the log has format {found!r}"
        )
    return found


class CommitSource(NamedTuple):
    """The source server from which a commit was captured.

    A promoted server continues the epoch only if its timeline descends from this one and has all transactions of the
    log. Any other server can continue the log only in a new epoch.
    """

    timeline: int
    system_id: str = ""
    """System identifier of the source cluster; "" in commits of older cdc versions.

    Those versions recorded the system identifier only once, in the LogIdentity of the log.
    """
    publication: int = 0
    """OID of the publication when the reader connected to the source; 0 if unknown.

    A publication that was dropped and created again has another OID.
    """
    switch_point: Lsn = Lsn(0)
    """First byte of the timeline, where a promotion left the one before; 0 for the first timeline, or if unknown.

    Two servers that were promoted from the same timeline have the same number, but another switch point.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """Metadata of a commit that appended to the log."""

    last: Position
    """Durable position after this commit."""
    committed_at: int
    """Source commit time of the last transaction in this Delta commit, in µs since 1970 UTC; 0 if there is none."""
    timeline: int
    rows: int = 0
    transactions: int = 0
    system_id: str = ""
    """System identifier of the source cluster; "" if the commit does not name it."""
    publication: int = 0
    """OID of the publication; 0 if the commit does not name it."""
    views: str = ""
    """In the log of views: JSON that says what the views were computed from; "" in the change log."""
    switch_point: Lsn = Lsn(0)  # noqa: RUF009 - an int, never changed
    """First byte of the timeline; 0 for the first timeline, or if the commit does not name it."""

    @property
    def commit_source(self) -> CommitSource:
        """Return the source server from which the commit was captured."""
        return CommitSource(self.timeline, self.system_id, self.publication, self.switch_point)

    def to_metadata(self) -> dict[str, str]:
        """Return the metadata as Delta stores it: keys that begin with `cdc.`, and text values."""
        return {
            "cdc.last": str(self.last),
            "cdc.committed_at": str(self.committed_at),
            "cdc.timeline": str(self.timeline),
            "cdc.rows": str(self.rows),
            "cdc.transactions": str(self.transactions),
            "cdc.system_id": self.system_id,
            "cdc.publication": str(self.publication),
            **({"cdc.views": self.views} if self.views else {}),
            "cdc.switch_point": str(self.switch_point),
        }

    @classmethod
    def from_metadata(cls, fields: Mapping[str, Any]) -> Self | None:
        """Parse the metadata of a Delta commit.

        Return None for a commit without a position, such as the one that creates the table.
        """
        if "cdc.last" not in fields:
            return None
        return cls(
            last=Position.parse(fields["cdc.last"]),
            committed_at=int(fields["cdc.committed_at"]),
            timeline=int(fields["cdc.timeline"]),
            rows=int(fields["cdc.rows"]),
            transactions=int(fields["cdc.transactions"]),
            system_id=fields.get("cdc.system_id", ""),
            publication=int(fields.get("cdc.publication", 0)),
            views=fields.get("cdc.views", ""),
            switch_point=Lsn.parse(fields.get("cdc.switch_point", "0/0")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One data file of the log, with everything that a read plan needs to know about it."""

    path: str
    """Absolute path of the file, or its URL in an object store."""
    rows: int
    size: int
    """Size of the file in bytes."""
    first: Position
    last: Position
    segment: int
    schemas_only: bool = False
    """True if all rows of the file are `s` rows.

    The writer puts `s` rows into separate files, so that readers find them without reading other files.
    """
    partial: bool = True
    """False if the statistics prove that the file has no partial images."""
    committed_at: int = 0
    """Commit time of the latest transaction in the file, in microseconds UTC, truncated to milliseconds."""
    skip_upto: Position = Position(0)  # noqa: RUF009 - an int, never changed
    """Position up to which a reader skips the rows of this file, because `compacted` contains their state."""
    relations: tuple[int, int] | None = None
    """Least and greatest relation number in the file; None if all rows are messages, or if not known."""
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """Connection options of the object store that contains the file; some of them are secret."""


def log_file_of_action(path: FilePath, action: Mapping[str, Any]) -> LogFile:
    """Return the LogFile for one data file.

    `action` is the file's row in delta-rs' flattened list of add actions. `path` is the directory of the table.
    """
    latest = action.get("max.committed_at")
    return LogFile(
        path=str(path / action["path"]),
        rows=action["num_records"],
        size=action["size_bytes"],
        first=Position(action["min.position"]),
        last=Position(action["max.position"]),
        segment=int(action["partition.segment"]),
        schemas_only=action["min.op"] == action["max.op"] == Operation.SCHEMA.value,
        partial=action.get("max.partial") is not False,
        committed_at=0 if latest is None else int(latest.timestamp() * 1_000_000),
        relations=None if action.get("min.relation") is None else (action["min.relation"], action["max.relation"]),
        options=getattr(path, "options", ()),
    )


def log_file_of_add(path: FilePath, add: Mapping[str, Any]) -> LogFile:
    """Return the LogFile for the `add` action of a commit. `path` is the directory of the table."""
    found = json.loads(add["stats"])
    bounds = {f"min.{name}": found["minValues"].get(name) for name in STATISTICS}
    bounds |= {f"max.{name}": found["maxValues"].get(name) for name in STATISTICS}
    latest = bounds["max.committed_at"]
    return log_file_of_action(
        path,
        {
            "path": add["path"],
            "num_records": found["numRecords"],
            "size_bytes": add["size"],
            "partition.segment": add["partitionValues"]["segment"],
            **bounds,
            "max.committed_at": None if latest is None else datetime.fromisoformat(latest),
        },
    )


def delta_statistics(rows: pa.Table) -> str:
    """Return the Delta statistics, as JSON text, of a file that contains these rows."""
    least: dict[str, Any] = {}
    greatest: dict[str, Any] = {}
    nulls: dict[str, int] = {}
    for name in STATISTICS:
        column = rows[name]
        nulls[name] = column.null_count
        if column.null_count == len(column) or pa.types.is_boolean(column.type):
            continue
        bounds = pc.min_max(column.cast(pa.int64()) if name == "committed_at" else column)
        low, high = bounds["min"].as_py(), bounds["max"].as_py()
        least[name], greatest[name] = (
            (low, high) if name != "committed_at" else (_iso_milliseconds(low), _iso_milliseconds(high))
        )
    least["partial"], greatest["partial"] = bool(pc.all(rows["partial"]).as_py()), bool(pc.any(rows["partial"]).as_py())
    return json.dumps({"numRecords": rows.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls})


def _iso_milliseconds(micros: int) -> str:
    # Delta statistics contain milliseconds (PROTOCOL.md, per-file statistics)
    time = _EPOCH + timedelta(microseconds=micros)
    return time.strftime("%Y-%m-%dT%H:%M:%S.") + f"{time.microsecond // 1000:03d}Z"


def segment_of(relative: str) -> int:
    """Return the segment number in the path of a data file relative to its table: `segment=7/x.parquet` → 7."""
    return int(relative.partition("/")[0].removeprefix("segment="))


def trimmed_id(log_id: str) -> str:
    """Return the application id with which a `txn` action in `changes` records the last trimmed position."""
    return f"{log_id}/trimmed"


def floor_id(log_id: str) -> str:
    """Return the application id with which a `txn` action in `compacted` records the floor."""
    return f"{log_id}/floor"
