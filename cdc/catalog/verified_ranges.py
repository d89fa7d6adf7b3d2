"""Catalog store of verified key ranges: when each range was compared, and how many rows differed.

A verification compares a table in passes. A pass is a sequence of ranges without gaps, numbered from 0; the last range
has no end key. While a pass runs, the previous complete pass is kept, so that the status always covers all rows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from cdc.catalog.connection import Database, upsert
from cdc.catalog.models import VerifiedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRange:
    """The result of comparing one key range of one table in one sink."""

    sink: str
    topic: str
    """Topic of the table, `schema.table`."""
    began: datetime
    """Start time of the pass that the range belongs to."""
    number: int = 0
    """Number of the range in its pass."""
    first: str | None = None
    """Inclusive start of the range: a value of the first key column as Postgres text; None without a lower bound."""
    ended: str | None = None
    """Exclusive end of the range: a value of the first key column as Postgres text; None without an upper bound."""
    rows: int
    """Number of rows of the range at the source."""
    mismatched: int
    """Number of rows that differ, are missing or are superfluous; a lower bound if not all of them were counted."""
    position: int
    """Position at which source and target were compared."""
    verified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTable:
    """The verification results of one table in one sink."""

    sink: str
    topic: str
    through: datetime | None
    """Time of the earliest comparison in the newest complete pass; None without a complete pass."""
    position: int | None
    """Lowest position at which a range of the newest complete pass was compared; None without a complete pass."""
    rows: int
    """Number of rows in the newest complete pass."""
    mismatched: int
    """Mismatched rows of the newest pass; if it is not complete, the last complete pass counts for the other ranges."""
    equal_at: datetime | None
    """End time of the newest complete pass without mismatches; None without such a pass."""
    ranges: int
    """Number of ranges compared in the newest pass."""
    ended: bool
    """True if the newest pass is complete."""


class VerifiedRangeStore:
    """The store of verified ranges."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, found: VerifiedRange) -> None:
        """Store the result of one range; it replaces a result with the same pass and range number.

        After the last range of a pass is stored, the method deletes the older passes. If the completed pass has
        mismatches, the method keeps the latest older pass without mismatches.
        """
        row = {name: getattr(found, name) for name in VerifiedRange.__slots__}
        with self._database.writing() as session:
            upsert(session, VerifiedRow, [{"pipeline": pipeline, **row, "position": int(found.position)}])
            if found.ended is None:
                _delete_older_passes(session, pipeline, found)

    def retain(self, pipeline: str, sink: str, topics: Collection[str]) -> None:
        """Delete the results of the sink's tables that are not in `topics`, such as dropped or renamed tables."""
        row = VerifiedRow
        with self._database.writing() as session:
            session.execute(
                delete(row).where(row.pipeline == pipeline, row.sink == sink, row.topic.not_in(list(topics)))
            )

    def retain_sinks(self, pipeline: str, sinks: Collection[str]) -> None:
        """Delete the results of sinks that are not in `sinks`, such as sinks that left the definition."""
        row = VerifiedRow
        with self._database.writing() as session:
            session.execute(delete(row).where(row.pipeline == pipeline, row.sink.not_in(list(sinks))))

    def forget_unended(self, pipeline: str, sink: str, topic: str) -> None:
        """Delete the newest pass over a table if it has not ended, so that the next one begins with its first range."""
        row = VerifiedRow
        of_table = (row.pipeline == pipeline, row.sink == sink, row.topic == topic)
        with self._database.writing() as session:
            passes = _passes([_range(found) for found in session.scalars(select(row).where(*of_table))])
            if passes and not _is_complete(passes[0]):
                session.execute(delete(row).where(*of_table, row.began == passes[0][0].began))

    def passes(self, pipeline: str, sink: str, topic: str) -> list[list[VerifiedRange]]:
        """Return the passes over one table, newest first; each pass is the list of its ranges in order."""
        row = VerifiedRow
        query = select(row).where(row.pipeline == pipeline, row.sink == sink, row.topic == topic)
        with self._database.reading() as session:
            return _passes([_range(found) for found in session.scalars(query)])

    def ls(self, pipeline: str) -> list[VerifiedTable]:
        """Return the results of every table that was compared at least once, sorted by sink and topic."""
        row = VerifiedRow
        query = select(row).where(row.pipeline == pipeline).order_by(row.sink, row.topic)
        with self._database.reading() as session:
            listed = [_range(found) for found in session.scalars(query)]
        by_table = groupby(listed, key=lambda found: (found.sink, found.topic))
        return [_table(_passes(ranges)) for _, ranges in by_table]


def _delete_older_passes(session: Session, pipeline: str, last: VerifiedRange) -> None:
    row = VerifiedRow
    of_table = (row.pipeline == pipeline, row.sink == last.sink, row.topic == last.topic)
    passes = _passes([_range(found) for found in session.scalars(select(row).where(*of_table))])
    retained = {last.began}
    if not _is_equal(next(ranges for ranges in passes if ranges[0].began == last.began)):
        retained |= {ranges[0].began for ranges in passes if _is_equal(ranges)}
        retained = {last.began, max(retained - {last.began}, default=last.began)}
    session.execute(delete(row).where(*of_table, row.began <= last.began, row.began.not_in(retained)))


def _passes(ranges: Iterable[VerifiedRange]) -> list[list[VerifiedRange]]:
    ordered = sorted(ranges, key=lambda found: (found.began, -found.number), reverse=True)
    return [list(of_pass) for _, of_pass in groupby(ordered, key=lambda found: found.began)]


def _table(passes: Sequence[Sequence[VerifiedRange]]) -> VerifiedTable:
    newest = passes[0]
    complete = next((ranges for ranges in passes if _is_complete(ranges)), None)
    equal = next((ranges for ranges in passes if _is_equal(ranges)), None)
    counted = list(newest) if _is_complete(newest) or complete is None else [*newest, *complete[len(newest) :]]
    return VerifiedTable(
        sink=newest[0].sink,
        topic=newest[0].topic,
        through=None if complete is None else min(found.verified_at for found in complete),
        position=None if complete is None else min(found.position for found in complete),
        rows=0 if complete is None else sum(found.rows for found in complete),
        mismatched=sum(found.mismatched for found in counted),
        equal_at=None if equal is None else max(found.verified_at for found in equal),
        ranges=len(newest),
        ended=_is_complete(newest),
    )


def _is_complete(ranges: Sequence[VerifiedRange]) -> bool:
    return ranges[-1].ended is None


def _is_equal(ranges: Sequence[VerifiedRange]) -> bool:
    return _is_complete(ranges) and not any(found.mismatched for found in ranges)


def _range(row: VerifiedRow) -> VerifiedRange:
    return VerifiedRange(**{name: getattr(row, name) for name in VerifiedRange.__slots__})
