"""Audit of the rows of a file against the statistics in its commit; no I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.change import Operation
from cdc.log.audit.finding import DamageKind
from cdc.log.audit.transactions import runs
from cdc.log.layout import STATISTICS
from cdc.position import Position
from cdc.table import TableSchema

Place = tuple[int, int]
"""(position, ordinal)."""
_NO_RELATION: Final = np.iinfo(np.int64).max
"""Messages belong to no relation and stand last in a file."""
_MILLISECOND: Final = 1_000
"""Microseconds: statistics of times are cut to it."""
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitClaim:
    """What a table says of one of its files."""

    table: str
    name: str
    """Relative to the table's directory."""
    rows: int
    size: int
    """Bytes."""
    bounds: Mapping[str, tuple[Any, Any]]
    """Column of STATISTICS → its least and greatest value; without those of which the commit says nothing."""
    after: Position
    """Every position in it lies above."""
    upto: Position
    """Every position in it lies here or below."""

    @classmethod
    def of(cls, table: str, action: Mapping[str, Any], within: tuple[Position, Position]) -> CommitClaim:
        """The claim of a file as delta-rs lists it, its statistics in columns of their own."""
        said: dict[str, tuple[Any, Any]] = {
            name: (action.get(f"min.{name}"), action.get(f"max.{name}")) for name in STATISTICS
        }
        if said["committed_at"][0] is not None:
            least, greatest = said["committed_at"]
            said["committed_at"] = _millis(least), _millis(greatest)
        return cls(
            table=table,
            name=action["path"],
            rows=action["num_records"],
            size=action["size_bytes"],
            bounds={name: bounds for name, bounds in said.items() if bounds[0] is not None},
            after=within[0],
            upto=within[1],
        )

    @property
    def path(self) -> str:
        """Relative to the log's root."""
        return f"{self.table}/{self.name}"

    @property
    def first(self) -> Position:
        """The least position, as far as the commit says."""
        return Position(self.bounds.get("position", (0, 0))[0])

    @property
    def last(self) -> Position:
        """The greatest position."""
        return Position(self.bounds.get("position", (0, 0))[1])

    @property
    def relations(self) -> tuple[int, int] | None:
        """Least and greatest; None if it holds messages alone."""
        return self.bounds.get("relation")

    @property
    def has_schemas_only(self) -> bool:
        """Whether it holds `s` rows and nothing else."""
        return self.bounds.get("op") == (Operation.SCHEMA.value, Operation.SCHEMA.value)


@dataclass(slots=True)
class FileContents:
    """What the rows of one file come to, one row group after the other."""

    rows: int = 0
    bounds: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """As Claim.bounds."""
    unsorted_at: Place | None = None
    """The first row that does not stand behind the one before it."""
    repeated_at: Place | None = None
    """The first row with relation and place of the one before it."""
    firsts: dict[int, Place] = field(default_factory=dict)
    """Relation → its first row, schema rows not counted."""
    columns: dict[int, set[int]] = field(default_factory=dict)
    """Relation → ids of the columns in its images."""
    runs: list[np.ndarray] = field(default_factory=list)
    """Of each row group, as `runs` gives it."""
    _before: tuple[int, int, int] | None = None

    def add(self, rows: pa.Table) -> None:
        """Take the next rows (LOG_SCHEMA) of the file."""
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
        """What is wrong with the rows, by themselves and by what the commit says of them."""
        if self.rows != claim.rows:
            yield DamageKind.CONTENTS, f"has {self.rows:,} rows, but its commit records {claim.rows:,}"
        for name, found in self.bounds.items():
            said = claim.bounds.get(name)
            if said != found:
                yield DamageKind.CONTENTS, f"{name} goes from {_pair(found)}, but its commit records {_pair(said)}"
        least, greatest = self.bounds.get("position", (claim.upto, claim.upto))
        if least <= claim.after or greatest > claim.upto:
            allowed = f"its commit contains positions above {claim.after!s} and up to {claim.upto!s}"
            yield DamageKind.RANGE, f"contains {_place(least)} to {_place(greatest)}, but {allowed}"
        if self.repeated_at is not None:
            yield DamageKind.DUPLICATE, f"contains {_text(self.repeated_at)} twice"
        if self.unsorted_at is not None:
            yield (
                DamageKind.ORDER,
                f"is not sorted by relation, position and ordinal: {_text(self.unsorted_at)} is late",
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
    """The schema rows of a log, and whether each row has one before it."""

    def __init__(self) -> None:
        self._first: dict[int, Place] = {}
        self._columns: dict[int, set[int]] = {}
        self._topics: dict[int, str] = {}
        self._called: dict[int, set[str]] = {}

    def add(self, place: Place, schema: TableSchema) -> None:
        """Take a schema row; in any order, the last given names the topic."""
        relation = schema.relation
        self._first[relation] = min(place, self._first.get(relation, place))
        self._columns.setdefault(relation, set()).update(column.id for column in schema.columns)
        self._topics[relation] = schema.topic
        self._called.setdefault(relation, set()).add(schema.topic)

    def name(self, relation: int) -> str:
        """The topic, or its number if no schema row names it."""
        return self._topics.get(relation, f"relation {relation}")

    def topics(self, relation: int) -> set[str]:
        """All that it was ever called."""
        return self._called.get(relation, {self.name(relation)})

    def within(self, relations: tuple[int, int] | None) -> list[int]:
        """The known relations from the least to the greatest; none for None."""
        if relations is None:
            return []
        return [number for number in sorted(self._topics) if relations[0] <= number <= relations[1]]

    def faults(self, contents: FileContents) -> Iterator[tuple[int, Place, str]]:
        """(relation, its first row in the file, what is wrong) of the tables whose rows cannot be read."""
        for relation, place in contents.firsts.items():
            known = self._first.get(relation)
            if known is None or known > place:
                yield relation, place, "the first row comes before any schema row"
                continue
            unknown = contents.columns.get(relation, set()) - self._columns[relation]
            if unknown:
                yield relation, place, f"no schema row has the columns {sorted(unknown)}"


def _columns(relation: np.ndarray, images: pa.ChunkedArray) -> Iterator[tuple[int, int]]:
    """(relation, column id) of the images, each once or a few times."""
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


def _millis(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _text(place: Place) -> str:
    return f"{_place(place[0])}#{place[1]}"


def _place(position: int) -> str:
    return str(Position(position)) if position >= 0 else str(position)


def _pair(bounds: tuple[Any, Any] | None) -> str:
    return "nothing" if bounds is None else f"{bounds[0]!r} to {bounds[1]!r}"
