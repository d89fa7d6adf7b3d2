"""Checks of log rows without I/O: the rows of one file against its commit, and transactions across all files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.audit.finding import DamageKind
from cdc.log.disk_format import STATISTICS
from cdc.log_row import Operation
from cdc.position import Position
from cdc.table import TableSchema

Place = tuple[int, int]
"""Position and ordinal of a row."""
_NO_RELATION: Final = np.iinfo(np.int64).max
"""Relation number for messages, which have no relation; it is the greatest int64, so messages sort last."""
_MILLISECOND: Final = 1_000
"""Microseconds in a millisecond; times in statistics are truncated to milliseconds."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitClaim:
    """Metadata of one data file, from the commit that added the file."""

    table: str
    name: str
    """Path of the file relative to the table's directory."""
    rows: int
    size: int
    """Size of the file in bytes."""
    bounds: Mapping[str, tuple[Any, Any]]
    """Column of STATISTICS → least and greatest value in the file; columns without statistics are missing."""
    after: Position
    """Lower bound of the positions in the file, excluded."""
    upto: Position
    """Upper bound of the positions in the file, included."""

    @classmethod
    def of(cls, table: str, action: Mapping[str, Any], within: tuple[Position, Position]) -> CommitClaim:
        """Return the claim for one data file, given as a row of delta-rs' flattened list of add actions.

        `within` is the range (after, upto] of positions that the file may contain.
        """
        bounds_of: dict[str, tuple[Any, Any]] = {
            name: (action.get(f"min.{name}"), action.get(f"max.{name}")) for name in STATISTICS
        }
        if bounds_of["committed_at"][0] is not None:
            least, greatest = bounds_of["committed_at"]
            bounds_of["committed_at"] = _millis(least), _millis(greatest)
        return cls(
            table=table,
            name=action["path"],
            rows=action["num_records"],
            size=action["size_bytes"],
            bounds={name: bounds for name, bounds in bounds_of.items() if bounds[0] is not None},
            after=within[0],
            upto=within[1],
        )

    @property
    def path(self) -> str:
        """Path of the file relative to the log's root."""
        return f"{self.table}/{self.name}"

    @property
    def first(self) -> Position:
        """Least position in the file; 0 if the commit has no statistics of the file."""
        return Position(self.bounds.get("position", (0, 0))[0])

    @property
    def last(self) -> Position:
        """Greatest position in the file; 0 if the commit has no statistics of the file."""
        return Position(self.bounds.get("position", (0, 0))[1])

    @property
    def relations(self) -> tuple[int, int] | None:
        """Least and greatest relation number in the file; None if all rows are messages."""
        return self.bounds.get("relation")

    @property
    def has_schemas_only(self) -> bool:
        """True if all rows of the file are `s` rows."""
        return self.bounds.get("op") == (Operation.SCHEMA.value, Operation.SCHEMA.value)


@dataclass(slots=True)
class FileContents:
    """Summary of the rows of one file, collected row group by row group, and then compared with the file's commit."""

    rows: int = 0
    bounds: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """Column of STATISTICS → least and greatest value in the rows."""
    unsorted_at: Place | None = None
    """First row that sorts before its predecessor; None if the rows are sorted."""
    repeated_at: Place | None = None
    """First row with the same relation, position and ordinal as its predecessor; None if there is none."""
    firsts: dict[int, Place] = field(default_factory=dict)
    """Relation → position and ordinal of its first row that is not an `s` row."""
    columns: dict[int, set[int]] = field(default_factory=dict)
    """Relation → ids of the columns that its row images contain."""
    runs: list[np.ndarray] = field(default_factory=list)
    """One array per row group with its sequences of consecutive ordinals, as the function `runs` returns them."""
    _before: tuple[int, int, int] | None = None

    def add(self, rows: pa.Table) -> None:
        """Add the next rows of the file; they have the columns LOG_SCHEMA."""
        if not rows.num_rows:
            return
        position, ordinal = rows["position"].to_numpy(), rows["ordinal"].to_numpy()
        relation = pc.fill_null(rows["relation"], _NO_RELATION).to_numpy()
        self.rows += rows.num_rows
        self._bound(rows)
        self._order(relation, position, ordinal)
        self.runs.append(runs(position, ordinal))
        images = pc.not_equal(rows["op"], Operation.SCHEMA.value).to_numpy() & (relation != _NO_RELATION)
        self._first(relation[images], position[images], ordinal[images])
        for name in ("before", "after"):
            for number, column in _columns(relation, rows[name]):
                self.columns.setdefault(number, set()).add(column)

    def faults(self, claim: CommitClaim) -> Iterator[tuple[DamageKind, str]]:
        """Yield (kind of damage, message) for each contradiction in the rows or between rows and commit."""
        if self.rows != claim.rows:
            yield DamageKind.CONTENTS, f"the file has {self.rows:,} rows, but its commit records {claim.rows:,}"
        for name, found in self.bounds.items():
            expected = claim.bounds.get(name)
            if expected != found:
                yield (
                    DamageKind.CONTENTS,
                    f"the values of column {name} are {_pair(found)}, but the file's commit records {_pair(expected)}",
                )
        least, greatest = self.bounds.get("position", (claim.upto, claim.upto))
        if least <= claim.after or greatest > claim.upto:
            allowed = f"its commit may contain only positions above {claim.after!s} and up to {claim.upto!s}"
            yield DamageKind.RANGE, f"the file contains positions {_place(least)} to {_place(greatest)}, but {allowed}"
        if self.repeated_at is not None:
            yield DamageKind.DUPLICATE, f"the file contains row {_text(self.repeated_at)} twice"
        if self.unsorted_at is not None:
            yield (
                DamageKind.ORDER,
                f"row {_text(self.unsorted_at)} is out of order: rows must be sorted by relation, position and ordinal",
            )

    def _bound(self, rows: pa.Table) -> None:
        for name in STATISTICS:
            column = rows[name].cast(pa.int64()) if name == "committed_at" else rows[name]
            least, greatest = pc.min_max(column).values()
            if not least.is_valid:
                continue
            scale = _MILLISECOND if name == "committed_at" else None
            low, high = (value.as_py() if scale is None else value.as_py() // scale for value in (least, greatest))
            before = self.bounds.get(name, (low, high))
            self.bounds[name] = min(low, before[0]), max(high, before[1])

    def _order(self, relation: np.ndarray, position: np.ndarray, ordinal: np.ndarray) -> None:
        before = self._before or (relation[0], -1, -1)
        steps = [
            np.diff(column, prepend=start) for column, start in zip((relation, position, ordinal), before, strict=True)
        ]
        by_relation, by_position, by_ordinal = steps
        same = (by_relation == 0) & (by_position == 0)
        ascending = (by_relation > 0) | ((by_relation == 0) & (by_position > 0)) | (same & (by_ordinal > 0))
        repeated = same & (by_ordinal == 0)
        self.repeated_at = self.repeated_at or _first_of(repeated, position, ordinal)
        self.unsorted_at = self.unsorted_at or _first_of(~ascending & ~repeated, position, ordinal)
        self._before = int(relation[-1]), int(position[-1]), int(ordinal[-1])

    def _first(self, relation: np.ndarray, position: np.ndarray, ordinal: np.ndarray) -> None:
        order = np.lexsort((ordinal, position, relation))
        numbers, starts = np.unique(relation[order], return_index=True)
        for number, at in zip(numbers.tolist(), order[starts].tolist(), strict=True):
            place = int(position[at]), int(ordinal[at])
            self.firsts[number] = min(place, self.firsts.get(number, place))


class SchemaVersions:
    """All schema rows of a log, to check that a schema row precedes the rows of each table."""

    def __init__(self) -> None:
        self._first: dict[int, Place] = {}
        self._columns: dict[int, set[int]] = {}
        self._topics: dict[int, str] = {}
        self._all_topics: dict[int, set[str]] = {}

    def add(self, place: Place, schema: TableSchema) -> None:
        """Add a schema row. Schema rows may be added in any order; the last one added gives the relation its name."""
        relation = schema.relation
        self._first[relation] = min(place, self._first.get(relation, place))
        self._columns.setdefault(relation, set()).update(column.id for column in schema.columns)
        self._topics[relation] = schema.topic
        self._all_topics.setdefault(relation, set()).add(schema.topic)

    def name(self, relation: int) -> str:
        """Return the topic of a relation, or `relation N` if no schema row has this relation."""
        return self._topics.get(relation, f"relation {relation}")

    def topics(self, relation: int) -> set[str]:
        """Return all topics that the relation ever had."""
        return self._all_topics.get(relation, {self.name(relation)})

    def within(self, relations: tuple[int, int] | None) -> list[int]:
        """Return the known relations between the two numbers, both included; empty for None."""
        if relations is None:
            return []
        return [number for number in sorted(self._topics) if relations[0] <= number <= relations[1]]

    def faults(self, contents: FileContents) -> Iterator[tuple[int, Place, str]]:
        """Yield (relation, first row in the file, message) for each relation whose rows have no matching schema row."""
        for relation, place in contents.firsts.items():
            known = self._first.get(relation)
            if known is None or known > place:
                yield relation, place, "the first row of a table comes before the schema row of the table"
                continue
            unknown = contents.columns.get(relation, set()) - self._columns[relation]
            if unknown:
                yield relation, place, f"rows have columns that no schema row of the table has: ids {sorted(unknown)}"


class Gap(NamedTuple):
    """A group of transactions in one file that all have the same damage: missing rows, or repeated rows."""

    damage: DamageKind
    """DamageKind.HOLE for missing rows, DamageKind.DUPLICATE for repeated rows."""
    file: int
    """Number of the file, as passed to `Transactions.add`.

    The file contains the first row after the missing rows, or a repeated row.
    """
    first: int
    """Position of the first transaction of the group."""
    ordinal: int
    """Ordinal of one row in the first transaction of the group.

    It is the first row after the missing rows, or the repeated row.
    """
    last: int
    """Position of the last transaction of the group."""
    transactions: int
    """Number of transactions in the group."""


class Transactions:
    """Collects the ordinals of each transaction of `changes`, and finds missing and repeated ordinals.

    Files are added in order of their first position. So a transaction below the first position of the next file is
    complete and can be checked. Only transactions that may continue in a later file stay in memory.
    """

    def __init__(self, after: Position) -> None:
        """Create an empty collection.

        Missing rows of transactions at or below `after` are not reported, because they may have been trimmed.
        """
        self._after = after
        self._open = np.empty((0, 4), np.int64)

    def add(self, file: int, found: np.ndarray) -> None:
        """Add the rows of a file.

        `file` is the number of the file. `found` is the array that the function `runs` returns for the file's rows.
        """
        numbered = np.column_stack((found, np.full(len(found), file, np.int64)))
        self._open = np.concatenate((self._open, numbered))

    def check_below(self, below: int | None = None, unseen: Iterable[tuple[int, int]] = ()) -> list[Gap]:
        """Check the transactions below a position (default: all), and return the gaps, sorted by first position.

        The checked transactions are removed from memory. `unseen` contains position ranges (first, last) whose rows
        were lost or not read. Missing rows inside these ranges are not reported.
        """
        complete = np.ones(len(self._open), bool) if below is None else self._open[:, 0] < below
        own, self._open = self._open[complete], self._open[~complete]
        own = own[np.lexsort((own[:, 1], own[:, 0]))]
        if not len(own):
            return []
        position, start, end, _ = own.T
        begins = np.diff(position, prepend=-1) != 0
        expected = np.where(begins, 0, np.roll(end, 1) + 1)
        holes = (start > expected) & (position > self._after)
        for first, last in unseen if holes.any() else ():
            holes &= (position < first) | (position > last)
        gaps = [*_gaps(DamageKind.HOLE, own[holes]), *_gaps(DamageKind.DUPLICATE, own[start < expected])]
        return sorted(gaps, key=lambda gap: gap.first)


def runs(position: np.ndarray, ordinal: np.ndarray) -> np.ndarray:
    """Return one row (position, first ordinal, last ordinal) for each sequence of consecutive ordinals, sorted.

    A sequence belongs to one transaction. The arguments are the positions and ordinals of log rows in any order.
    """
    order = np.lexsort((ordinal, position))
    position, ordinal = position[order], ordinal[order]
    continues = (np.diff(position) == 0) & (np.diff(ordinal) == 1)
    starts = np.concatenate(([0], np.flatnonzero(~continues) + 1))
    ends = np.concatenate((starts[1:], [len(position)])) - 1
    return np.stack((position[starts], ordinal[starts], ordinal[ends]), axis=1)


def _columns(relation: np.ndarray, images: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """Yield the (relation, column id) pairs in the row images; a pair may occur several times."""
    start = 0
    for chunk in images.chunks:
        offsets = chunk.offsets.to_numpy()
        ids = chunk.keys.to_numpy()[offsets[0] : offsets[-1]].astype(np.int64)
        owners, codes = np.unique(relation[start : start + len(chunk)], return_inverse=True)
        pairs = pc.unique(pa.array(ids * len(owners) + np.repeat(codes, np.diff(offsets))))
        yield from ((int(owners[pair % len(owners)]), pair // len(owners)) for pair in pairs.to_pylist())
        start += len(chunk)


def _first_of(wrong: np.ndarray, position: np.ndarray, ordinal: np.ndarray) -> Place | None:
    if not wrong.any():
        return None
    at = int(wrong.argmax())
    return int(position[at]), int(ordinal[at])


def _millis(time: datetime) -> int:
    return (time - _EPOCH) // timedelta(milliseconds=1)


def _text(place: Place) -> str:
    return f"{_place(place[0])}#{place[1]}"


def _place(position: int) -> str:
    return str(Position(position)) if position >= 0 else str(position)


def _pair(bounds: tuple[Any, Any] | None) -> str:
    return "nothing" if bounds is None else f"{bounds[0]!r} to {bounds[1]!r}"


def _gaps(damage: DamageKind, wrong: np.ndarray) -> Iterator[Gap]:
    for file in np.unique(wrong[:, 3]).tolist():
        own = wrong[wrong[:, 3] == file]
        yield Gap(damage, file, int(own[0, 0]), int(own[0, 1]), int(own[-1, 0]), len(own))
