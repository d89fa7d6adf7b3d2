"""On-disk format of the log: table names, table properties, commit metadata, file statistics.

Writers and readers share these definitions; nothing here does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol, Self, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import LOG_SCHEMA, Operation
from cdc.errors import LogFormatUnknown
from cdc.position import Position

FORMAT: Final = 2
"""Version of the log's layout. A newer one is refused; an older one is read, and written once `migrate` has raised it.

2: every page of a file that is written has a checksum.
"""

CHANGES: Final = "changes"
"""The table of every change, in commit order."""

COMPACTED: Final = "compacted"
"""The table of the latest state per key, up to a horizon."""

TABLE_SCHEMA: Final = LOG_SCHEMA.append(pa.field("segment", pa.int32(), nullable=False))
"""The Delta table's columns: the log row and the partition its file lies in."""

ORDER: Final = [("relation", "ascending"), ("position", "ascending"), ("ordinal", "ascending")]
"""Of the rows in a file. By key they would be found a little faster; by position a reader that wants what came late
skips the others, and the columns of numbers take a fraction of the bytes."""

STATISTICS: Final = ("position", "ordinal", "relation", "op", "partial", "committed_at")
"""Columns whose least and greatest value stand in the Delta log, for pruning."""

PARQUET: Final[dict[str, Any]] = {
    "compression": "lz4",
    "use_dictionary": ["relation", "topic", "op", "xid", "partial", "committed_at"],
    # of images nobody asks for the least and the greatest value, and finding them costs a tenth of the writing
    "write_statistics": ["position", "ordinal", "xid", "committed_at", "relation", "topic", "op", "partial"],
    # a flipped byte is found when its page is read; not measurable beside the rest of an append
    "write_page_checksum": True,
    # larger ones are mapped, and given back, one by one while they are made
    "data_page_size": 1 << 18,
}
"""Parquet options of all files of the log."""

GROUP: Final = 16_384
"""Rows of a row group: who wants one table of many, or a part of a range, reads whole ones; 1,400 bytes of footer each,
less than 0.3 % of the bytes."""
SMALL_GROUP: Final = 4_096
"""The same in a file of more relations than it would have groups: 2 % more bytes, and a table is a quarter as many."""

PROPERTIES: Final[Mapping[str, str]] = {
    "delta.dataSkippingStatsColumns": ",".join(STATISTICS),
    "delta.checkpointInterval": "100",
    # A reader that is a few minutes behind starts from a checkpoint; older commit files only slow listing down.
    "delta.logRetentionDuration": "interval 10 minutes",
    "delta.enableExpiredLogCleanup": "true",
    # Checkpoints name files that left for so long, and small ones leave by the thousand; who deletes them has notes.
    "delta.deletedFileRetentionDuration": "interval 1 minute",
}


class FilePath(Protocol):
    """A path, in whatever store."""

    def __truediv__(self, below: str, /) -> Self: ...


_P = TypeVar("_P", bound=FilePath)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class LogIdentity:
    """The source of the log; written once, when the log is created."""

    system_id: str
    """Of the source cluster (`IDENTIFY_SYSTEM`)."""
    database: str

    def to_description(self) -> str:
        """The Delta table's description."""
        return json.dumps({"format": FORMAT, "system_id": self.system_id, "database": self.database})

    @classmethod
    def from_description(cls, text: str) -> Self:
        """Read it back; raises LogFormatUnknown for a log of a newer version or of something else."""
        format_of(text)
        fields = json.loads(text)
        return cls(system_id=fields["system_id"], database=fields["database"])


def format_of(description: str) -> int:
    """The version of the layout that a table's description names; raises LogFormatUnknown for one not known here."""
    try:
        found = json.loads(description)["format"]
    except (ValueError, KeyError, TypeError) as exc:
        raise LogFormatUnknown("not a change log: the table's description has no format") from exc
    if not isinstance(found, int) or not 1 <= found <= FORMAT:
        raise LogFormatUnknown(f"unknown log format: expected {FORMAT}, got {found!r}")
    return found


class Lineage(NamedTuple):
    """Which life of which source a commit was made from; another one is never continued without a new epoch."""

    timeline: int
    system_id: str = ""
    """Of the cluster; "" in a log whose commits do not say: then the log's own holds."""
    publication: int = 0
    """OID of the publication that the session began with, 0 if not said: one made anew has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitInfo:
    """What a commit of the log says about itself."""

    last: Position
    """The durable position once the commit is made."""
    committed_at: int
    """Microseconds UTC of the last transaction, 0 when there was none."""
    timeline: int
    rows: int = 0
    transactions: int = 0
    system_id: str = ""
    """Of the cluster; "" where the commit does not say."""
    publication: int = 0
    """OID of the publication, 0 where the commit does not say."""

    @property
    def lineage(self) -> Lineage:
        """What the commit was made from."""
        return Lineage(self.timeline, self.system_id, self.publication)

    def to_metadata(self) -> dict[str, str]:
        """The commit's metadata, all text."""
        return {
            "cdc.last": str(self.last),
            "cdc.committed_at": str(self.committed_at),
            "cdc.timeline": str(self.timeline),
            "cdc.rows": str(self.rows),
            "cdc.transactions": str(self.transactions),
            "cdc.system_id": self.system_id,
            "cdc.publication": str(self.publication),
        }

    @classmethod
    def from_metadata(cls, fields: Mapping[str, Any]) -> Self | None:
        """Read it back; None for a commit that is not an append (the table's creation)."""
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
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One data file of the log as readers plan with it."""

    path: str
    """Absolute, or the URL in an object store."""
    rows: int
    size: int
    """Bytes."""
    first: Position
    last: Position
    segment: int
    schemas_only: bool = False
    """It holds `s` rows and nothing else: the writer keeps those apart, so that they are found without a scan."""
    partial: bool = True
    """It may hold partial images."""
    committed_at: int = 0
    """Microseconds UTC of its latest transaction, cut to milliseconds as Delta statistics are."""
    beyond: Position = Position(0)  # noqa: RUF009 - an int, never changed
    """Rows at or below are read from another file and are not read from this one."""
    relations: tuple[int, int] | None = None
    """Least and greatest; None if it holds messages alone, or what is in it is not looked at."""
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """How the object store that it lies in is reached; some are secret."""


def log_file_of_action(path: FilePath, action: Mapping[str, Any]) -> LogFile:
    """A file of the table at path, as delta-rs lists it with its statistics in columns of their own."""
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


def delta_statistics(rows: pa.Table) -> str:
    """The Delta statistics of a file that holds rows, as JSON."""
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
        least[name], greatest[name] = (low, high) if name != "committed_at" else (_instant(low), _instant(high))
    least["partial"], greatest["partial"] = bool(pc.all(rows["partial"]).as_py()), bool(pc.any(rows["partial"]).as_py())
    return json.dumps({"numRecords": rows.num_rows, "minValues": least, "maxValues": greatest, "nullCount": nulls})


def _instant(micros: int) -> str:
    # Delta statistics hold milliseconds (PROTOCOL.md, per-file statistics)
    moment = _EPOCH + timedelta(microseconds=micros)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{moment.microsecond // 1000:03d}Z"


def segment_of(relative: str) -> int:
    """The partition that a data file lies in, by its path below the table's."""
    return int(relative.partition("/")[0].removeprefix("segment="))


def commit_file(table: _P, version: int) -> _P:
    """Where the commit that made a version of the table at that path lies."""
    return table / "_delta_log" / f"{version:020d}.json"


def trimmed_id(log_id: str) -> str:
    """The application id of `changes` whose `txn` version is the last position that was trimmed."""
    return f"{log_id}/trimmed"


def floor_id(log_id: str) -> str:
    """The application id of `compacted` whose `txn` version is the position up to which deletes are forgotten."""
    return f"{log_id}/floor"
