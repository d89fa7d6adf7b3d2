"""Lost: what a file's name says comes back from it, and no batch ends where rows are missing without a word."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cdc.log import lost_range_records
from cdc.log.disk_format import LogFile
from cdc.log.lost_range_records import LostRange
from cdc.position import Position

numbers = st.integers(0, 40)
positions = numbers.map(Position)
ranges = st.lists(
    st.tuples(numbers, numbers, numbers).map(lambda three: LostRange(*map(Position, sorted(three)))), max_size=4
).map(lambda found: sorted(found, key=lambda one: one.recorded_at))


def file(name: str, told: int, *, schemas_only: bool = True) -> LogFile:
    end = Position(told)
    return LogFile(
        path=f"s3://b/log/changes/segment=3/{name}",
        rows=1,
        size=1,
        first=end,
        last=end,
        segment=3,
        schemas_only=schemas_only,
    )


@given(positions, positions)
def test_the_name_of_a_file_holds_its_range(first: Position, last: Position):
    name = lost_range_records.lost_range_file_name(first, last)
    assert lost_range_records.range_in_file_name(f"segment=3/{name}") == (first, last)
    assert lost_range_records.lost_ranges_in([file(name, 99)]) == [(first, last, 99)]
    assert lost_range_records.lost_ranges_in([file(name, 99, schemas_only=False)]) == []


def test_other_files_tell_of_nothing():
    for name in ("settled-0f-0f.parquet", "lost-.parquet", "lost-zz-1-00.parquet", "x.parquet"):
        assert lost_range_records.range_in_file_name(name) is None


@given(ranges, positions, positions)
def test_a_batch_is_never_shortened_and_ends_where_nothing_is_missing_unsaid(
    found: list[LostRange], after: Position, upto: Position
):
    end = lost_range_records.end_after_lost_ranges(found, after, upto)
    assert end >= upto
    assert not any(one.cuts(after, end) for one in found)
    assert end == upto or end in {one.recorded_at for one in found}


@given(ranges, positions)
def test_who_has_read_the_rows_is_held_up_by_nothing(found: list[LostRange], upto: Position):
    after = max((one.last for one in found), default=Position(0))
    assert lost_range_records.end_after_lost_ranges(found, after, upto) == upto
