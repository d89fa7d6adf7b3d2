"""Which segments are compacted, when runs are merged, and how often each byte is written."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdc.log import small_file_rewrite
from cdc.log.disk_format import LogFile
from cdc.position import Position
from pipelines.compaction.compaction_steps import MOST_RUNS, cold_end, first_run_to_merge

SEGMENT, COMMITS = 128 << 20, 600
"""Bytes or commits after which a segment of the model is full."""
FOOTER = 5_000
"""Bytes of a file without its rows."""


def file(segment: int, first: int, last: int) -> LogFile:
    return LogFile(path="x", rows=1, size=1, first=Position(first), last=Position(last), segment=segment)


CLOSED = [file(1, 10, 20), file(1, 21, 30), file(2, 31, 31), file(3, 40, 50)]


@pytest.mark.parametrize(
    ("files", "upto", "end"),
    [
        ([], None, None),
        ([file(7, 1, 9)], None, None),
        (CLOSED, None, 31),
        (CLOSED, 31, 31),
        (CLOSED, 30, 30),
        (CLOSED, 29, None),
        # a transaction with its schema rows in one segment and the others in the next
        ([file(1, 10, 20), file(1, 30, 30), file(2, 30, 35)], None, 29),
        ([file(1, 30, 30), file(2, 28, 35)], None, 27),
    ],
)
def test_the_cold_part_ends_with_a_whole_transaction_of_a_closed_segment(
    files: list[LogFile], upto: int | None, end: int | None
) -> None:
    assert cold_end(files, None if upto is None else Position(upto)) == end


@given(seed=st.integers(0, 2**32 - 1), growth=st.sampled_from([0.0, 0.3, 0.6, 1.0]))
def test_runs_stay_few_and_each_byte_is_written_few_times(seed: int, growth: float) -> None:
    """growth: share of bytes that remains when runs are merged; 1: no key changes twice."""
    random = Random(seed)
    runs = [random.choice([1, 100, 10_000])]
    taken = written = runs[0]
    for _ in range(400):
        run = random.randint(1, 20)
        runs.append(run)
        taken, written = taken + run, written + run
        if (first := first_run_to_merge(runs)) is not None:
            merged = max(runs[first], int(growth * sum(runs[first:])))
            runs = [*runs[:first], merged]
            written += merged
        assert len(runs) <= MOST_RUNS + 1
    assert written <= (3 if growth < 1 else 5) * taken


@pytest.mark.parametrize("growth", [0.1, 1.0])
@pytest.mark.parametrize("commit", [100, pytest.param(50_000, marks=pytest.mark.slow), 10_000_000])
def test_each_byte_is_written_at_most_five_times_in_total(commit: int, growth: float) -> None:
    """commit: average bytes of a commit. growth: share of bytes that remains when runs are merged."""
    random = Random(commit)
    payload: dict[str, int] = {}
    changes: list[LogFile] = []
    runs: list[int] = []
    first = written = 0
    for segment in range(30):
        size, place = 0, count()
        while size < SEGMENT and (at := next(place)) < COMMITS:
            own = random.randint(1, 2 * commit)
            name = f"x/{segment} {at}"
            payload[name], size = own, size + own + FOOTER
            begins = Position(segment * COMMITS + at + 1)
            changes.append(replace(file(segment, begins, begins), path=name, size=own + FOOTER))
            first += own + FOOTER
            if at % 50 == 0:
                written += rewrite_small_files(changes, payload)
        if segment % 3 == 2:
            closed = [found for found in changes if found.segment < segment]
            runs.append(sum(payload.pop(found.path) for found in closed))
            changes = [found for found in changes if found.segment == segment]
            written += runs[-1]
            while (start := first_run_to_merge(runs)) is not None:
                runs[start:] = [max(runs[start], int(growth * sum(runs[start:])))]
                written += runs[-1]
    assert len(runs) < 20
    assert (first + written) / first <= 5


def rewrite_small_files(changes: list[LogFile], payload: dict[str, int]) -> int:
    """Replace small files; return the bytes written."""
    written = 0
    while (job := small_file_rewrite.plan_rewrite(changes)) is not None:
        for group in job.groups:
            name = f"x/{job.prefix}{group[0].path.removeprefix('x/')}"
            payload[name] = sum(payload.pop(old.path) for old in group)
            size = payload[name] + FOOTER
            gone = set(group)
            changes[:] = [found for found in changes if found not in gone]
            changes.append(replace(group[0], path=name, size=size, last=group[-1].last))
            written += size
    return written


def test_the_first_run_is_merged_when_the_others_are_larger() -> None:
    assert first_run_to_merge([]) is None
    assert first_run_to_merge([5]) is None
    assert first_run_to_merge([5, 5]) is None
    assert first_run_to_merge([5, 3, 3]) == 0
    assert first_run_to_merge([100, *[1] * MOST_RUNS]) is None
    assert first_run_to_merge([100, *[1] * (MOST_RUNS + 1)]) == 1
    assert first_run_to_merge([10_000, 40, *[1] * MOST_RUNS]) == 2
    assert first_run_to_merge([2**90, *[2**n for n in range(MOST_RUNS + 5, 0, -1)]]) == MOST_RUNS + 4
