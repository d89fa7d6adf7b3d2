"""Pace: rows of a reference no faster than somebody allows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pyarrow as pa

from cdc.postgres.key_ranges import Digest, KeyRange
from pipelines.verification.compare_rows import Rows
from pipelines.verification.reference import ComparedRows, Reference


class ReadRateLimit:
    """So many rows a second over everything that is read; None is as fast as it goes."""

    def __init__(
        self,
        rate: int | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = rate
        self._clock, self._sleep = clock, sleep
        self._due = 0.0

    def taken(self, rows: int) -> None:
        """Rows were read: wait until that many may have been."""
        if not self.rate:
            return
        now = self._clock()
        self._due = max(self._due, now) + rows / self.rate
        self._sleep(self._due - now)


class RateLimitedReference:
    """A reference whose rows come at a pace."""

    def __init__(self, reference: Reference, pace: ReadRateLimit) -> None:
        self._reference, self._pace = reference, pace

    def rows(self, wanted: ComparedRows, within: KeyRange | None = None) -> Rows:
        """Reads the columns, and waits after every batch."""
        read = self._reference.rows(wanted, within)

        def rows() -> Iterator[pa.RecordBatch]:
            for batch in read():
                yield batch
                self._pace.taken(batch.num_rows)

        return rows

    def count(self, wanted: ComparedRows, within: KeyRange | None = None) -> int:
        """How many rows there are, waited for as if they had been read."""
        rows = self._reference.count(wanted, within)
        self._pace.taken(rows)
        return rows

    def digest(self, wanted: ComparedRows, within: KeyRange | None = None) -> Digest | None:
        """The digest, waited for as if the rows had been read."""
        digest = self._reference.digest(wanted, within)
        if digest is not None:
            self._pace.taken(digest.rows)
        return digest
