"""Backfill requests, their progress, and key lists.

The catalog stores requests and progress as JSON documents. A key list is CSV text with one key per line; commas
separate the values of a key.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final, Self

from cdc.errors import ConfigError
from cdc.table import CAPTURED, TableSchema, TableState, matches

BACKFILL: Final = "backfill"
"""Kind of the command that requests a backfill. Its payload is a BackfillRequest, its result a BackfillState."""
KEYS: Final = 10_000
"""Maximum number of keys in one request.

A listing of backfills reads all keys of each request from the catalog, so longer key lists would make it slow.
"""


Key = tuple[str, ...]
_RANGE: Final = re.compile(r'((?:[^".]|"(?:[^"]|"")*"|\.(?!\.))*)\.\.(.*)', re.DOTALL)
"""`FROM..TO`: the first two dots outside double quotes divide it."""


class BackfillAction(StrEnum):
    """Actions on a pending backfill; each is a kind of command in the catalog, such as `backfill.pause`."""

    #: Pause the backfill after its pending chunks.
    PAUSE = "pause"
    #: Continue a paused backfill.
    RESUME = "resume"
    #: End the backfill early; rows that are already in the log stay.
    CANCEL = "cancel"

    @property
    def kind(self) -> str:
        """Kind of the command that stores this action in the catalog; its payload contains the `id` of the backfill."""
        return f"{BACKFILL}.{self.value}"


@dataclass(frozen=True, slots=True)
class BackfillRequest:
    """A request to read all or some rows of tables again."""

    tables: tuple[str, ...]
    """Globs that select the topics of the tables."""
    where: str | None = None
    first: tuple[str, ...] | None = None
    last: tuple[str, ...] | None = None
    """Last key of a key range, as text values; `first` and `last` are both inclusive, and None means no bound."""
    sink: str | None = None
    rate: int | None = None
    """Maximum number of rows per second; None for no maximum."""
    resync: bool = False
    """True to copy whole tables, and to delete from the targets all rows that the source no longer has."""
    epoch: int | None = None
    """Epoch of the log if the reader itself requested this copy of tables; None for every other request."""
    keys: tuple[tuple[str, ...], ...] | None = None
    """Key list of one table, as text values; a key without a row at the source is deleted in the targets."""
    completes: bool = False
    """True if the table, whose state is `snapshotting`, is complete once its key list was read.

    This applies only in the epoch of the request.
    """

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build a request from the result of `to_json`."""
        values: dict[str, Any] = dict(fields)
        for name in ("tables", "first", "last"):
            values[name] = tuple(values[name]) if values.get(name) else None
        if values.get("keys") is not None:  # an empty list must not become the whole table
            values["keys"] = tuple(map(tuple, values["keys"]))
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the request as a JSON document for the catalog."""
        return asdict(self)


@dataclass(slots=True)
class Blocks:
    """A block range of a table or leaf partition; the log does not yet contain all rows of the range."""

    oid: int
    file: int
    """`pg_class.relfilenode` of the table; the block numbers are valid only for this file."""
    next: int
    end: int
    """Number of the first block after the range."""


@dataclass(slots=True)
class TableBackfillState:
    """Progress of the backfill of one table."""

    state: str = "queued"
    """State of the table: `queued`, `snapshotting`, `done` or `failed`."""
    rows: int = 0
    estimate: int = 0
    """Number of rows in the table, as estimated by the planner of Postgres."""
    seconds: float = 0.0
    """Seconds spent on reading so far."""
    after: list[str] | None = None
    """If the table is read by key: the last key that is durable in the log, or None before the first chunk."""
    blocks: list[Blocks] | None = None
    """If the table is read by blocks: the ranges that are not yet copied; otherwise None."""
    size: int = 0
    """Number of blocks of the whole table."""
    began: int | None = None
    """Position at which the full copy began; None for any other backfill."""
    since: int | None = None
    """Durable position at which the backfill of the table began; None for a full copy, which uses `began`."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """Build the state from its fields in the JSON document."""
        blocks = fields.get("blocks")
        return cls(**{**fields, "blocks": None if blocks is None else [Blocks(**part) for part in blocks]})

    @property
    def share(self) -> float | None:
        """Completed share of the table, from 0 to 1; None if unknown."""
        if self.state == "done":
            return 1.0
        if self.blocks is not None and self.size:
            return 1 - sum(part.end - part.next for part in self.blocks) / self.size
        return self.rows / max(self.estimate, self.rows) if self.rows else None

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds until the table is completely copied; None if unknown."""
        share = self.share
        return self.seconds * (1 - share) / share if share else None


@dataclass(slots=True)
class BackfillState:
    """Progress of a backfill, stored in the catalog so that a restarted reader can continue."""

    state: str = "queued"
    """State: `queued`, `snapshotting`, `paused`, `done`, `cancelled` or `failed`."""
    tables: dict[str, TableBackfillState] = field(default_factory=dict)
    """Progress of each table, by topic."""
    reason: str | None = None
    """Why the backfill waits; None if it does not wait, or if a command paused it."""

    @classmethod
    def from_json(cls, fields: Mapping[str, Any] | None) -> Self:
        """Build the state from the result of `to_json`, or from None if the backfill has not begun."""
        values = fields or {}
        tables = {topic: TableBackfillState.from_json(done) for topic, done in values.get("tables", {}).items()}
        return cls(values.get("state", "queued"), tables, values.get("reason"))

    def to_json(self) -> dict[str, Any]:
        """Return the state as a JSON document for the catalog."""
        return asdict(self)


def check_request(
    request: BackfillRequest, known: Mapping[int, TableSchema], sinks: Mapping[str, Any]
) -> list[TableSchema]:
    """Return the schemas of the tables that a request covers. Raises ConfigError if the request is invalid.

    `known` maps each relation to its schema. The keys of `sinks` are the names of the sinks.
    """
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
                remedy=f"copy the table again: cdc tables resync '{schema.topic}'",
            )
    if request.keys is not None:
        _check_listed(request, request.keys, chosen)
    return chosen


def _check_listed(request: BackfillRequest, keys: tuple[tuple[str, ...], ...], tables: list[TableSchema]) -> None:
    if request.resync or any(value is not None for value in (request.where, request.first, request.last)):
        raise ConfigError(
            "a key list cannot be combined with a key range, a condition or a resync",
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
            remedy="split the list into several requests, or use a key range or a condition",
        )


def parse_keys(lines: Iterable[str], where: str) -> tuple[Key, ...]:
    """Parse lines of CSV text into keys, without duplicates.

    Empty lines are ignored. The line `""` is a key whose value is the empty string.
    Raises ConfigError if a line is malformed; its message contains the line number and `where`, the name of the input.
    """
    rows = csv.reader(lines, strict=True)
    try:
        return tuple(dict.fromkeys(tuple(row) for row in rows if row))
    except csv.Error as exc:
        raise ConfigError(
            f"malformed key in line {rows.line_num} of {where}: {exc}",
            remedy="enclose a value that has a comma, quote or line break in double quotes; double each quote inside",
        ) from exc


def parse_key_range(text: str) -> tuple[Key | None, Key | None]:
    """Parse `FROM..TO` into the first and the last key, in the form of key lists; None for an omitted bound.

    Two dots inside double quotes belong to a value. Raises ConfigError for a malformed range.
    """
    sides = _RANGE.fullmatch(text)
    if sides is None:
        raise ConfigError(
            f"malformed key range {text!r}: expected FROM..TO",
            remedy="write --keys FROM..TO; for one key, write --key KEY",
        )
    bounds = [parse_keys([side], f"--keys {text!r}") if side else () for side in sides.groups()]
    first, last = (keys[0] if keys else None for keys in bounds)
    return first, last


def key_range_text(first: Key | None, last: Key | None) -> str:
    """Format a key range as `FROM..TO`, so that `parse_key_range` returns the same keys."""
    lines = ["" if key is None else csv_line(key) for key in (first, last)]
    if ".." in lines[0] or lines[0].endswith("."):
        lines[0] = _quoted(first or ())
    return "..".join(lines)


def _quoted(key: Sequence[str]) -> str:
    return ",".join('"' + value.replace('"', '""') + '"' for value in key)


def csv_line(key: Sequence[str]) -> str:
    """Format one key as a line of CSV text, without the line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(key)  # values that contain either character are quoted
    return line.getvalue().removesuffix("\r\n")
