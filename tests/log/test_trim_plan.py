"""trimming: what may go is a pure function of the files, the horizon, who reads, and the time."""

from __future__ import annotations

from collections.abc import Collection

from hypothesis import given
from hypothesis import strategies as st

from cdc.boot_clock import SECOND, BootTimestamp
from cdc.log.consumers import Consumer
from cdc.log.disk_format import COMPACTED, LogFile
from cdc.log.retired_files import RemovedFiles
from cdc.log.trim_plan import trimmable
from cdc.log.vacuum import deletable
from cdc.position import Position

NOW = 1_000 * SECOND


def file(segment: int, last: int, committed_at: int = NOW) -> LogFile:
    return LogFile(
        path=f"{segment}-{last}",
        rows=1,
        size=1,
        first=Position(last),
        last=Position(last),
        segment=segment,
        committed_at=committed_at,
    )


def consumer(position: int) -> Consumer:
    return Consumer(f"c{position}", "lake", Position(position))


def trimmed(files: list[LogFile], horizon: int, consumers: list[int], max_age: float = 500.0) -> tuple[list[int], int]:
    return trimmable(
        files, horizon=Position(horizon), consumers=[consumer(c) for c in consumers], max_age=max_age, now_us=NOW
    )


SIX = [file(segment, 10 * segment) for segment in range(1, 7)]


def test_segments_behind_the_horizon_and_every_consumer_may_go():
    assert trimmed(SIX, 45, [60, 30]) == ([1, 2, 3], 30)
    assert trimmed(SIX, 25, [60, 30]) == ([1, 2], 20)


def test_the_newest_segment_never_goes():
    assert trimmed(SIX, 60, [60]) == ([1, 2, 3, 4, 5], 50)


def test_a_consumer_that_has_nothing_yet_holds_everything_young():
    assert trimmed(SIX, 60, [60, 0]) == ([], 0)


def test_nobody_registered_lets_only_old_segments_go():
    old = [file(s, 10 * s, NOW - 501 * SECOND if s < 3 else NOW) for s in range(1, 7)]
    assert trimmed(SIX, 60, []) == ([], 0)
    assert trimmed(old, 60, []) == ([1, 2], 20)


def test_an_old_segment_goes_whatever_a_consumer_says_and_never_before_it_is_compacted():
    old = [file(s, 10 * s, NOW - 501 * SECOND) for s in range(1, 7)]
    assert trimmed(old, 60, [5]) == ([1, 2, 3, 4, 5], 50)
    assert trimmed(old, 15, [5]) == ([1], 10)


def test_a_segment_of_unknown_age_is_not_old():
    assert trimmed([file(s, 10 * s, 0) for s in range(1, 4)], 60, [5]) == ([], 0)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 99), st.sampled_from([1, NOW])), max_size=12),
    st.integers(0, 99),
    st.lists(st.integers(0, 99), max_size=3),
)
def test_what_goes_is_the_old_end_without_a_gap(
    given_files: list[tuple[int, int, int]], horizon: int, consumers: list[int]
):
    files = [file(segment, last, at) for segment, last, at in given_files]
    segments, upto = trimmed(files, horizon, consumers)
    numbers = sorted({f.segment for f in files})
    gone = [f for f in files if f.segment in segments]
    assert segments == numbers[: len(segments)]
    assert len(segments) < len(numbers) or not numbers
    assert upto == max((f.last for f in gone), default=0) <= horizon
    assert all(f.last <= min(consumers, default=0) for f in gone if f.committed_at == NOW and max_is_young(f, files))


def max_is_young(one: LogFile, files: list[LogFile]) -> bool:
    return max(f.committed_at for f in files if f.segment == one.segment) == NOW


def note(seen_at: int | None = NOW - 60 * SECOND, table: str = COMPACTED) -> RemovedFiles:
    return RemovedFiles(table, 7, ("segment=1/a.parquet", "segment=1/b.parquet"), seen_at)


def deleted(one: RemovedFiles, held: Collection[str] = (), pinned: int | None = None, grace: float = 60.0) -> bool:
    return deletable([one], {one.table: held}, pinned=pinned, grace=grace, now=BootTimestamp(NOW)) == [one]


def test_files_are_deleted_once_their_grace_is_over():
    assert deleted(note())
    assert not deleted(note(), grace=61.0)


def test_the_grace_begins_when_somebody_sees_the_files_out_of_the_table():
    assert not deleted(note(seen_at=None))
    assert deleted(note(seen_at=None), grace=0.0)


def test_a_file_of_the_current_version_is_never_deleted_nor_what_left_with_it():
    assert not deleted(note(), held={"segment=1/b.parquet"})


def test_what_a_consumer_has_pinned_stays():
    assert not deleted(note(), pinned=6)
    assert deleted(note(), pinned=7)
    assert deleted(note(table="changes"), pinned=6)
