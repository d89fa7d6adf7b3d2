"""ranges: planning is a pure function of the files."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import MAX_BYTES, boundary, overlapping, split, split_evenly
from cdc.position import Position


@st.composite
def logs(draw: st.DrawFn) -> list[LogFile]:
    """Files as commits leave them: disjoint and in order."""
    gaps = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5), st.integers(1, 100)), max_size=12))
    files, at = [], 0
    for number, (gap, width, rows) in enumerate(gaps):
        first, at = at + gap, at + gap + width
        files.append(
            LogFile(path=f"{number:03}", rows=rows, size=rows * 10, first=Position(first), last=Position(at), segment=0)
        )
    return files


@given(logs(), st.integers(0, 60), st.integers(0, 60))
def test_a_file_is_read_exactly_when_it_can_hold_a_position_of_the_range(files: list[LogFile], after: int, upto: int):
    chosen = overlapping(files, Position(after), Position(upto))
    expected = [f for f in files if any(after < p <= upto for p in range(f.first, f.last + 1))]
    assert [f for f in chosen if f in expected] == expected


@given(logs(), st.integers(1, 200))
def test_batches_cover_the_log_once_and_always_move_on(files: list[LogFile], max_rows: int):
    durable = max((f.last for f in files), default=Position(0))
    at, seen = Position(0), []
    while at < durable:
        end = boundary(files, at, durable, max_rows)
        assert end > at
        seen += overlapping(files, at, end)
        at = end
    assert seen == files


def log_file(first: int, last: int, rows: int, *, schemas_only: bool = False) -> LogFile:
    return LogFile(
        path=f"{first}-{last}-{schemas_only}",
        rows=rows,
        size=rows,
        first=Position(first),
        last=Position(last),
        segment=0,
        schemas_only=schemas_only,
    )


def test_a_batch_from_the_beginning_has_more_than_the_schemas_of_a_log_without_a_snapshot():
    files = [log_file(10, 10, 1, schemas_only=True), log_file(11, 20, 50), log_file(21, 30, 50), log_file(31, 40, 50)]

    assert boundary(files, Position(0), Position(40), max_rows=110) == 30


def test_a_batch_from_the_beginning_ends_with_the_initial_snapshot():
    files = [log_file(10, 10, 1, schemas_only=True), log_file(10, 10, 50), log_file(11, 20, 50)]

    assert boundary(files, Position(0), Position(20), max_rows=1_000) == 10


@given(st.lists(st.integers(1, MAX_BYTES * 2), min_size=2, max_size=12), st.sampled_from([MAX_BYTES, 5 * MAX_BYTES]))
def test_a_batch_of_more_files_than_one_ends_before_they_are_too_large(sizes: list[int], most: int):
    files = [
        LogFile(path=f"{n:03}", rows=1, size=size, first=Position(n), last=Position(n), segment=0)
        for n, size in enumerate(sizes, 2)
    ]
    taken = overlapping(files, Position(1), boundary(files, Position(1), files[-1].last, 1_000, most))

    assert len(taken) == 1 or sum(file.size for file in taken) <= most
    assert len(taken) == len(files) or sum(file.size for file in files[: len(taken) + 1]) > most


@given(logs(), st.integers(1, 2000))
def test_split_keeps_every_file_in_order(files: list[LogFile], limit: int):
    groups = split(files, limit)
    assert [f for group in groups for f in group] == files
    assert all(len(group) == 1 or sum(f.size for f in group) <= limit for group in groups)


@given(logs(), st.integers(1, 8))
def test_an_even_division_has_every_file_once_and_the_largest_group_first(files: list[LogFile], count: int):
    groups = split_evenly(files, count)
    sizes = [sum(file.size for file in group) for group in groups]

    assert sorted(file.path for group in groups for file in group) == [file.path for file in files]
    assert len(groups) == min(count, len(files))
    assert sizes == sorted(sizes, reverse=True)
    assert all(group == overlapping(group, Position(0), Position(10**6)) for group in groups)
    largest = max((file.size for file in files), default=0)
    assert not sizes or sizes[0] - sizes[-1] <= largest
