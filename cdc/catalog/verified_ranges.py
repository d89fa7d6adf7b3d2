"""Catalog store of verified key ranges: pass, time and number of mismatched rows.

A pass over a table is a row of ranges without a gap, numbered from 0; the one without an end is the last. While a pass
is on its way the one before it stays, so that what is said of a table is always true of the whole of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby

from sqlalchemy import delete, select
from sqlalchemy.orm import Session

from cdc.catalog.database import Database, upsert
from cdc.catalog.models import VerifiedRow


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedRange:
    """One range of keys of one table in one sink."""

    sink: str
    topic: str
    """`schema.table`."""
    began: datetime
    """When the pass over the table began that it belongs to."""
    number: int = 0
    """Its place in the pass."""
    first: str | None = None
    """The first key of the range, included, as Postgres' text of the key's first column; None: from the beginning."""
    ended: str | None = None
    """The key that it ends before; None: to the end."""
    rows: int
    """Of the source."""
    mismatched: int
    """Rows that differ, are missing or are too many; of a digest that differs, 1 at least."""
    position: int
    """Both sides were compared as they were here."""
    verified_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedTable:
    """What is known of one table in one sink."""

    sink: str
    topic: str
    through: datetime | None
    """Every row was compared then or later; None until a whole pass is done."""
    position: int | None
    """The lowest at which a range of that pass was compared."""
    rows: int
    """In that pass."""
    mismatched: int
    """In what was compared last of every key: the newest pass, and the one before where it has not come yet."""
    equal_at: datetime | None
    """When the newest whole pass ended that found nothing."""
    ranges: int
    """Compared in the newest pass."""
    ended: bool
    """Whether that pass is done."""


class VerifiedRangeStore:
    """The store of ranges."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def record(self, pipeline: str, found: VerifiedRange) -> None:
        """Keep a range, one of the same place replaced; the last of a pass makes older passes go, but for one.

        That one is the newest that found nothing, while the new one found something.
        """
        row = {name: getattr(found, name) for name in VerifiedRange.__slots__}
        with self._database.writing() as session:
            upsert(session, VerifiedRow, [{"pipeline": pipeline, **row, "position": int(found.position)}])
            if found.ended is None:
                _forget(session, pipeline, found)

    def retain(self, pipeline: str, sink: str, topics: Collection[str]) -> None:
        """Forget every table of a sink but these: it is there no longer, or under another name."""
        row = VerifiedRow
        with self._database.writing() as session:
            session.execute(
                delete(row).where(row.pipeline == pipeline, row.sink == sink, row.topic.not_in(list(topics)))
            )

    def passes(self, pipeline: str, sink: str, topic: str) -> list[list[VerifiedRange]]:
        """The passes over one table, newest first, each in order."""
        row = VerifiedRow
        wanted = select(row).where(row.pipeline == pipeline, row.sink == sink, row.topic == topic)
        with self._database.reading() as session:
            return _passes([_range(found) for found in session.scalars(wanted)])

    def ls(self, pipeline: str) -> list[VerifiedTable]:
        """What is known of every table that was ever compared, by sink and topic."""
        row = VerifiedRow
        wanted = select(row).where(row.pipeline == pipeline).order_by(row.sink, row.topic)
        with self._database.reading() as session:
            listed = [_range(found) for found in session.scalars(wanted)]
        by_table = groupby(listed, key=lambda found: (found.sink, found.topic))
        return [_table(_passes(ranges)) for _, ranges in by_table]


def _forget(session: Session, pipeline: str, found: VerifiedRange) -> None:
    row = VerifiedRow
    same = (row.pipeline == pipeline, row.sink == found.sink, row.topic == found.topic)
    passes = _passes([_range(one) for one in session.scalars(select(row).where(*same))])
    kept = {found.began}
    if not _equal(next(ranges for ranges in passes if ranges[0].began == found.began)):
        kept |= {ranges[0].began for ranges in passes if _equal(ranges)}
        kept = {found.began, max(kept - {found.began}, default=found.began)}
    session.execute(delete(row).where(*same, row.began <= found.began, row.began.not_in(kept)))


def _passes(ranges: Iterable[VerifiedRange]) -> list[list[VerifiedRange]]:
    ordered = sorted(ranges, key=lambda found: (found.began, -found.number), reverse=True)
    return [list(of_pass) for _, of_pass in groupby(ordered, key=lambda found: found.began)]


def _table(passes: Sequence[Sequence[VerifiedRange]]) -> VerifiedTable:
    newest = passes[0]
    whole = next((ranges for ranges in passes if _whole(ranges)), None)
    equal = next((ranges for ranges in passes if _equal(ranges)), None)
    counted = list(newest) if _whole(newest) or whole is None else [*newest, *whole[len(newest) :]]
    return VerifiedTable(
        sink=newest[0].sink,
        topic=newest[0].topic,
        through=None if whole is None else min(found.verified_at for found in whole),
        position=None if whole is None else min(found.position for found in whole),
        rows=0 if whole is None else sum(found.rows for found in whole),
        mismatched=sum(found.mismatched for found in counted),
        equal_at=None if equal is None else max(found.verified_at for found in equal),
        ranges=len(newest),
        ended=_whole(newest),
    )


def _whole(ranges: Sequence[VerifiedRange]) -> bool:
    return ranges[-1].ended is None


def _equal(ranges: Sequence[VerifiedRange]) -> bool:
    return _whole(ranges) and not any(found.mismatched for found in ranges)


def _range(row: VerifiedRow) -> VerifiedRange:
    return VerifiedRange(**{name: getattr(row, name) for name in VerifiedRange.__slots__})
