"""Backfill requests and their progress, as JSON documents in the catalog, and key lists as CSV text.

A key list has one key per line, with its values separated by commas.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from cdc.errors import ConfigError
from cdc.table import CAPTURED, TableSchema, TableState, matches

BACKFILL: Final = "backfill"
"""Kind of the catalog command; its payload is a BackfillRequest, its result a BackfillState."""
KEYS: Final = 10_000
"""Maximum keys of one request; the catalog stores them, and listing requests reads them all."""


Key = tuple[str, ...]


class BackfillAction(StrEnum):
    """Actions on a running backfill; each is a kind of command, such as `backfill.pause`."""

    #: Pause after the pending chunks.
    PAUSE = "pause"
    #: Continue.
    RESUME = "resume"
    #: End after the pending chunks; rows that are already written stay.
    CANCEL = "cancel"

    @property
    def kind(self) -> str:
        """Kind of the command; its payload has the backfill's `id`."""
        return f"{BACKFILL}.{self.value}"


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """Tables and rows to read again, and how."""

    tables: tuple[str, ...]
    """Globs of topics."""
    where: str | None = None
    first: tuple[str, ...] | None = None
    last: tuple[str, ...] | None = None
    """Bounds of a key range as text, both inclusive."""
    sink: str | None = None
    rate: int | None = None
    """Maximum rows per second."""
    resync: bool = False
    """Copy the whole table; rows that the source no longer has are deleted from the targets."""
    epoch: int | None = None
    """Epoch of the log, if the reader itself requested the copy of new tables."""
    keys: tuple[tuple[str, ...], ...] | None = None
    """Keys of one table as text; a key without a row at the source becomes a deletion."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Parse the result of to_json."""
        values: dict[str, Any] = dict(fields)
        for name in ("tables", "first", "last"):
            values[name] = tuple(values[name]) if values.get(name) else None
        if values.get("keys") is not None:  # an empty list must not become the whole table
            values["keys"] = tuple(map(tuple, values["keys"]))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """The document for the catalog."""
        return asdict(self)


@dataclass(slots=True)
class Blocks:
    """Blocks of a table, or of a leaf partition, whose rows are not durable in the log yet."""

    oid: int
    file: int
    """`pg_class.relfilenode`; block numbers are valid for this file only."""
    next: int
    end: int
    """Exclusive."""


@dataclass(slots=True)
class TableBackfillState:
    """Progress of one table."""

    state: str = "queued"
    """`queued`, `snapshotting`, or `done`."""
    rows: int = 0
    estimate: int = 0
    """Planner's estimate of the table's rows."""
    seconds: float = 0.0
    """Seconds spent reading so far."""
    after: list[str] | None = None
    """Reading by key: the last key that is durable in the log."""
    blocks: list[Blocks] | None = None
    """Reading by blocks: the blocks that are left."""
    size: int = 0
    """Number of blocks of the whole table."""
    began: int | None = None
    """Position at which a full copy began."""
    since: int | None = None
    """Durable position when any other backfill of the table began."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Parse the result of asdict after JSON."""
        blocks = fields.get("blocks")
        return cls(**{**fields, "blocks": None if blocks is None else [Blocks(**part) for part in blocks]})

    @property
    def share(self) -> float | None:
        """Completed share, 0–1; None if unknown."""
        if self.state == "done":
            return 1.0
        if self.blocks is not None and self.size:
            return 1 - sum(part.end - part.next for part in self.blocks) / self.size
        return self.rows / max(self.estimate, self.rows) if self.rows else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until completion; None if unknown."""
        share = self.share
        return self.seconds * (1 - share) / share if share else None


@dataclass(slots=True)
class BackfillState:
    """Progress of a backfill; the catalog shows it, and a restarted reader continues from it."""

    state: str = "queued"
    """`queued`, `snapshotting`, `paused`, `done`, `cancelled`, or `failed`."""
    tables: dict[str, TableBackfillState] = field(default_factory=dict)
    """By topic."""
    reason: str | None = None
    """Why the backfill waits, if no command paused it."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> Self:
        """Parse the result of to_json; None for a backfill that has not begun."""
        values = fields or {}
        tables = {topic: TableBackfillState.from_json(done) for topic, done in values.get("tables", {}).items()}
        return cls(values.get("state", "queued"), tables, values.get("reason"))

    def to_json(self) -> dict[str, Any]:
        """The document for the catalog."""
        return asdict(self)


def check_request(
    request: BackfillRequest, known: Mapping[int, TableSchema], sinks: Mapping[str, Any]
) -> list[TableSchema]:
    """The tables of a request; raises ConfigError if the request is impossible."""
    if request.sink is not None and request.sink not in sinks:
        listed = ", ".join(map(repr, sinks)) or "none"
        raise ConfigError(
            f"the definition has no sink called {request.sink!r}", remedy=f"choose one of the sinks: {listed}"
        )
    live = [s for s in known.values() if s.state is not TableState.DROPPED]
    chosen = [s for s in live if matches(s.topic, request.tables)]
    for glob in request.tables:
        if not any(matches(s.topic, [glob]) for s in chosen):
            listed = ", ".join(sorted(s.topic for s in live)[:10]) or "none"
            raise ConfigError(
                f"no table of the log matches {glob!r}",
                remedy=f"choose one of the tables of the log: {listed}",
            )
    for schema in chosen:
        if not schema.key and not request.resync:
            raise ConfigError(
                f"table {schema.topic!r} has no key, so its rows cannot be read in ranges",
                remedy=f"give the table a primary key, or copy the whole table: cdc tables resync '{schema.topic}'",
            )
        for key in (request.first, request.last, *(request.keys or ())):
            if key is not None and len(key) != len(schema.key):
                names = ", ".join(column.name for column in schema.key)
                raise ConfigError(
                    f"the key of table {schema.topic!r} has the columns ({names}): got {len(key)} values",
                    remedy="separate the values by commas, and put a value with a comma in double quotes",
                )
        if schema.state not in CAPTURED and not request.resync:
            raise ConfigError(
                f"table {schema.topic!r} cannot be read again, because it is {schema.state.value}: {schema.reason}",
                remedy=f"cdc tables resync '{schema.topic}'",
            )
    if request.keys is not None:
        _check_listed(request, request.keys, chosen)
    return chosen


def _check_listed(request: BackfillRequest, keys: tuple[tuple[str, ...], ...], tables: list[TableSchema]) -> None:
    if request.resync or any(value is not None for value in (request.where, request.first, request.last)):
        raise ConfigError(
            "a key list cannot be combined with a key range, a predicate or a resync",
            remedy="use only one of these options",
        )
    if len(tables) > 1:
        topics = ", ".join(sorted(schema.topic for schema in tables)[:10])
        raise ConfigError(
            f"a key list needs exactly one table: got {len(tables)}: {topics}", remedy="name exactly one table"
        )
    if not keys:
        raise ConfigError("the list of keys is empty", remedy="name at least one key, or omit the list")
    if len(keys) > KEYS:
        raise ConfigError(
            f"one request cannot contain {len(keys):,} keys: expected at most {KEYS:,}",
            remedy="split the list into several requests, or use a key range or a predicate",
        )


def parse_keys(lines: Iterable[str], where: str) -> tuple[Key, ...]:
    """Parse keys without duplicates; skips empty lines, and reads `""` as an empty text.

    where: name of the input for the error. Raises ConfigError with the line number.
    """
    rows = csv.reader(lines, strict=True)
    try:
        return tuple(dict.fromkeys(tuple(row) for row in rows if row))
    except csv.Error as exc:
        raise ConfigError(
            f"malformed key in line {rows.line_num} of {where}: {exc}",
            remedy='put a value with a comma, quote or line break in double quotes, and double each quote: "a,""b"',
        ) from exc


def csv_line(key: Sequence[str]) -> str:
    """Format one key as a line, without line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(key)  # values that contain either character are quoted
    return line.getvalue().removesuffix("\r\n")
