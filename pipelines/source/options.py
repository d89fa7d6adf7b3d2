"""Which rows a frame reads: the options of the data source `cdc`, and the filters that Spark pushes down.

Creating a frame checks its options, which pipelines/README.md describes. A pushed filter only avoids reading rows that
it excludes. Spark applies every filter again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Final, Self

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from cdc.config.object_store import Storage, log_root
from cdc.errors import InvalidDefinition, LogTrimmed
from cdc.log import inspection
from cdc.log.file_selection import MAX_BYTES, TableSelection
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import exact_glob, matches
from cdc.target_names import POSITION_COLUMN
from pipelines.types import TypePolicy

EARLIEST: Final = "earliest"
LATEST: Final = "latest"

_SET: Final = r"\[!?+\]?+[^\]]*\]"
"""Pattern of a bracket expression in a glob, such as `[a,b]`; a comma inside it does not separate two globs."""
_GLOB: Final = re.compile(rf"(?:{_SET}|[^,])+")
_SPECIAL: Final = re.compile(rf"({_SET})|([\[,\s])")
_END: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """The options with which a Spark frame is read from the log."""

    path: str
    storage: str = "{}"
    """How to reach the object store of the path: the JSON text of Storage.to_json, without secrets."""
    tables: tuple[str, ...] = ()
    """Globs of `schema.table`; empty: all tables, and rows without a table, which are logical messages."""
    table: str | None = None
    """The table whose columns the frame has; None: the frame has log rows."""
    types: TypePolicy = TypePolicy.EXACT
    """Types of the columns of `table`."""
    columns: tuple[str, ...] = ()
    """Columns of the frame, in this order; empty: all."""
    starting: str | datetime = EARLIEST
    """`earliest`, `latest`, a position after which the frame begins, or the earliest commit time in the frame."""
    ending: str | datetime = LATEST
    """`latest`, or the last position or commit time that the frame includes. For batch frames only."""
    max_rows: int | None = None
    """Approximate maximum of rows per micro-batch; None: a micro-batch has everything that is durable."""
    max_bytes: int = MAX_BYTES
    """Maximum bytes of log files per micro-batch that has a maximum of rows."""
    history: bool = False
    """Whether the frame has every single change; trimmed changes are replaced by the state at the horizon."""
    boundaries: bool = False

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Self:
        """Parse Spark's options; raises InvalidDefinition, MalformedLsn or MalformedPosition."""
        if not options.get("path"):
            raise InvalidDefinition("data source 'cdc' needs option 'path': the root of a change log")
        parsed = cls(
            path=options["path"],
            storage=options.get("storage", "{}"),
            tables=_names(_GLOB.findall(options.get("tables", ""))),
            table=options.get("table"),
            types=_policy(options.get("types", TypePolicy.EXACT.value)),
            columns=_names(options.get("columns", "").split(",")),
            starting=_bound(options, "starting", EARLIEST),
            ending=_bound(options, "ending", LATEST),
            max_rows=_limit(options, "maxRowsPerTrigger"),
            max_bytes=_limit(options, "maxBytesPerTrigger") or MAX_BYTES,
            history=_flag(options, "history"),
            boundaries=_flag(options, "boundaries"),
        )
        _check_pairs(parsed, options)
        return parsed

    def open_log(self) -> LogReader:
        """Open the log at its latest commit."""
        return LogReader(log_root(self.path, Storage.from_json(self.storage)))

    def start(self, log: LogReader) -> Position:
        """Return the position after which the frame begins.

        Raises LogTrimmed for a time before the oldest change of the log.
        """
        if self.starting == EARLIEST:
            return Position(0)
        # a commit at exactly this time belongs to the frame
        return _position_of(log, self.starting, offset_us=-1)

    def end(self, log: LogReader) -> Position:
        """Return the last position of a batch frame, which is at most the durable position.

        Raises LogTrimmed as `start` does.
        """
        return min(_position_of(log, self.ending, offset_us=0), log.durable or Position(0))


def tables_option(globs: Sequence[str]) -> str:
    """Return the text of option `tables` for these globs. Commas, spaces and brackets in the globs are quoted."""
    return ",".join(_SPECIAL.sub(lambda found: found[1] or f"[{found[2]}]", glob) for glob in globs)


def _position_of(log: LogReader, bound: str | datetime, offset_us: int) -> Position:
    durable = log.durable or Position(0)
    if bound == LATEST:
        return durable
    if isinstance(bound, str):
        return Position.parse(bound)
    files, micros = log.every_file(), int(bound.timestamp() * 1_000_000)
    first = min((file.first for file in files), default=durable)
    if log.oldest and inspection.position_at_time(files, durable, micros) < first:
        raise LogTrimmed(
            f"time {bound.isoformat()} is before the oldest change in the log: changes up to {log.oldest!s} are trimmed"
        )
    return inspection.position_at_time(files, durable, micros + offset_us)


def _bound(options: Mapping[str, str], which: str, otherwise: str) -> str | datetime:
    position, time = f"{which}Position", f"{which}Timestamp"
    if time not in options:
        text = options.get(position, otherwise)
        if text not in (otherwise, LATEST):
            Position.parse(text)  # so that the error is raised here, not in a worker
        return text
    if position in options:
        raise InvalidDefinition(f"options {position!r} and {time!r} exclude each other: set only one of them")
    try:
        found = datetime.fromisoformat(options[time])
    except ValueError as exc:
        raise InvalidDefinition(
            f"option {time!r}: expected a time such as 2026-01-31T12:00:00Z, got {options[time]!r}"
        ) from exc
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _limit(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is not None and not (text.isdigit() and int(text)):
        raise InvalidDefinition(f"option {name!r}: expected a whole number above 0, got {text!r}")
    return None if text is None else int(text)


def _flag(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidDefinition(f"option {name!r}: expected true or false, got {text!r}")
    return text == "true"


def _policy(text: str) -> TypePolicy:
    if text not in (TypePolicy.EXACT, TypePolicy.TEXT):
        raise InvalidDefinition(f"option 'types': expected exact or text, got {text!r}")
    return TypePolicy(text)


def _names(texts: Sequence[str]) -> tuple[str, ...]:
    return tuple(text.strip() for text in texts if text.strip())


def _check_pairs(parsed: SourceOptions, options: Mapping[str, str]) -> None:
    if parsed.table is not None and parsed.tables:
        raise InvalidDefinition(
            "option 'table' cannot be combined with 'tables'", remedy="omit 'table', or omit 'tables'"
        )
    if parsed.table is None and "types" in options:
        raise InvalidDefinition("option 'types' requires option 'table'")
    if parsed.max_rows is None and "maxBytesPerTrigger" in options:
        raise InvalidDefinition("option 'maxBytesPerTrigger' requires option 'maxRowsPerTrigger'")
    if parsed.boundaries and (parsed.table is not None or parsed.columns):
        raise InvalidDefinition(
            "option 'boundaries' cannot be combined with 'table' and 'columns'",
            remedy="omit 'boundaries', or omit 'table' and 'columns'",
        )
    if "columns" in options and not parsed.columns:
        raise InvalidDefinition("option 'columns': expected names of columns, got none")
    if len(set(parsed.columns)) < len(parsed.columns):
        raise InvalidDefinition("option 'columns' names a column twice")
    for kind in (str, datetime):
        ends = [bound for bound in (parsed.starting, parsed.ending) if isinstance(bound, kind)]
        values = [Position.parse(end) if isinstance(end, str) else end for end in ends if end not in (EARLIEST, LATEST)]
        if len(values) == 2 and values[0] > values[1]:  # type: ignore[operator]  # noqa: PLR2004 - of one kind
            raise InvalidDefinition(
                f"options 'starting…' and 'ending…': the end {ends[1]!s} is before the start {ends[0]!s}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PushedFilters:
    """Bounds on positions, relations and topics that Spark's filters set. Both ends of a bound are included."""

    positions: tuple[int, int] = (0, _END)
    relations: tuple[int, int] = (0, _END)
    topics: frozenset[str] | None = None
    """The allowed topics; None: all topics."""

    @classmethod
    def of(cls, filters: Iterable[Filter]) -> Self:
        """Return the bounds that all filters together set.

        Only filters on position, relation and topic set a bound.
        """
        pushed = cls()
        for one in filters:
            name = getattr(one, "attribute", ("",))[0]
            if name in ("position", POSITION_COLUMN):
                pushed = replace(pushed, positions=_intersect(pushed.positions, _bounds(one)))
            elif name == "relation":
                pushed = replace(pushed, relations=_intersect(pushed.relations, _bounds(one)))
            elif name == "topic" and isinstance(one, EqualTo | In):
                named = frozenset(_values(one))
                pushed = replace(pushed, topics=named if pushed.topics is None else named & pushed.topics)
        return pushed

    def within(self, after: Position, upto: Position) -> tuple[Position, Position]:
        """Return the part of the range (after, upto] that is within the bounds, as (after, upto)."""
        low, high = max(after, self.positions[0] - 1), min(upto, self.positions[1])
        return Position(min(low, upto)), Position(max(high, 0))

    def narrowed(self, tables: TableSelection) -> TableSelection | None:
        """Return the tables that are in `tables` and within the bounds; None if no row can pass the filters."""
        relations = self.relations if tables.relations is None else _intersect(self.relations, tables.relations)
        if relations[0] > relations[1]:
            return None
        if relations != (0, _END):
            tables = replace(tables, relations=relations)
        if self.topics is None:
            return tables
        named = [topic for topic in self.topics if not tables.globs or matches(topic, tables.globs)]
        return replace(tables, globs=tuple(map(exact_glob, sorted(named)))) if named else None


def _intersect(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return max(one[0], other[0]), min(one[1], other[1])


def _bounds(one: Any) -> tuple[int, int]:
    low, high = 0, _END
    if isinstance(one, EqualTo | In):
        values = _values(one)
        low, high = min(values, default=_END), max(values, default=-1)
    elif isinstance(one, GreaterThan | GreaterThanOrEqual):
        low = one.value + isinstance(one, GreaterThan)
    elif isinstance(one, LessThan | LessThanOrEqual):
        high = one.value - isinstance(one, LessThan)
    return low, high


def _values(one: Any) -> list[Any]:
    """Return the values that an equality or IN filter allows. NULL is left out, because no value equals it."""
    return [value for value in ([one.value] if isinstance(one, EqualTo) else one.value) if value is not None]
