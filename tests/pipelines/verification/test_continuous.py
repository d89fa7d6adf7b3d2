"""verify --every: ranges of keys one after the other, what is known of each kept, and gone on with after a stop."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Thread

import pytest
from deltalake import DeltaTable

from cdc.catalog import Catalog
from cdc.config.job_options import VerifyMode
from pipelines.__main__ import main
from pipelines.verification.continuous import ContinuousVerification, RangeResult, VerificationSchedule
from pipelines.verification.rate_limit import ReadRateLimit
from pipelines.verification.schedule import PassStart, next_place
from pipelines.verification.verify import VerifyOptions
from tests.catalog.test_verified_ranges import range_of
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.fixtures.waiting import until
from tests.pipelines.applying import Applying, verified, with_sinks
from tests.snapshot.reader_with_backfills import Running

HOURLY = VerificationSchedule(every=3600, range_rows=1000)
OFTEN = VerificationSchedule(every=0.001, range_rows=1000)


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """A table of three ranges and one without any order that both sides share."""
    run_sql(
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT i, 'v' || i FROM generate_series(1, 3000) i",
        "CREATE TABLE u (place float8 PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i / 10.0, 'v' || i FROM generate_series(1, 100) i",
    )
    return with_sinks(tmp_path, database)


def continuous(
    held: Captured, rhythm: VerificationSchedule, say: Callable[[RangeResult], None], mode: VerifyMode = VerifyMode.ROWS
) -> ContinuousVerification:
    options = VerifyOptions(sinks=("lake",), timeout=30.0, mode=mode)
    return ContinuousVerification(held.definition, options, rhythm, say)


def ranges(told: list[RangeResult], topic: str = "public.t") -> list[tuple[int, str | None, str | None, bool]]:
    """(number, first, ended, equal) of what was said of a table."""
    return [
        (one.found.number, one.found.first, one.found.ended, one.verdict.equal)
        for one in told
        if one.found is not None and one.verdict is not None and one.found.topic == topic
    ]


WHOLE = [(0, None, "1001", True), (1, "1001", "2001", True), (2, "2001", None, True)]


def test_a_pass_goes_on_where_a_stop_left_it_and_what_differs_is_found_told_and_mended(held: Captured) -> None:
    said: list[RangeResult] = []

    def stop_in_the_midst(told: RangeResult) -> None:
        said.append(told)
        if told.found is not None and told.found.ended == "2001":
            os.kill(os.getpid(), signal.SIGTERM)

    with Running(held), Applying(held) as applying, Catalog.open(held.definition.catalog.url) as catalog:
        until(lambda: _streams(held), "both tables in the lake")
        continuous(held, HOURLY, stop_in_the_midst).run()
        assert ranges(said) == WHOLE[:2]
        (begun, *_) = [one for one in catalog.verified.ls("held") if one.topic == "public.t"]
        assert (begun.through, begun.ranges, begun.ended) == (None, 2, False)
        work = continuous(held, HOURLY, said.append, VerifyMode.CHECKSUM)
        work.round(catalog)
        assert ranges(said) == WHOLE
        assert ranges(said, "public.u") == [(0, None, None, True)]
        assert len({one.found.began for one in said if one.found and one.found.topic == "public.t"}) == 1
        assert not work.wrong
        said.clear()
        work.round(catalog)
        assert said == []  # nothing is due for an hour
        with applying.resting():
            _spoil(held)
        work = continuous(held, OFTEN, said.append, VerifyMode.CHECKSUM)
        work.round(catalog)
        assert [equal for *_, equal in ranges(said)] == [True, False, False]
        assert {one.topic: one.mismatched for one in catalog.verified.ls("held")} == {"public.t": 3, "public.u": 1}
        assert work.wrong == {("lake", "public.t"), ("lake", "public.u")}
        said.clear()
        mending = VerificationSchedule(every=0.001, repair=True, range_rows=1000)
        work = continuous(held, mending, said.append)

        def mended() -> bool:
            work.round(catalog)
            return not work.wrong

        until(mended, "all of it equal")
        assert (1, "1001", "2001", True) in ranges(said)
        known = {one.topic: (one.mismatched, one.through == one.equal_at) for one in catalog.verified.ls("held")}
    assert known == {"public.t": (0, True), "public.u": (0, True)}


def _streams(held: Captured) -> bool:
    folder = held.folder / "lake" / "public"
    return all(DeltaTable.is_deltatable(str(folder / name)) for name in "tu")


def _spoil(held: Captured) -> None:
    folder = held.folder / "lake" / "public"
    DeltaTable(str(folder / "t")).delete("id = 1500 OR id = 2500")
    DeltaTable(str(folder / "t")).update(updates={"v": "'bad'"}, predicate="id = 3000")
    DeltaTable(str(folder / "u")).update(updates={"v": "'bad'"}, predicate="place < 0.15")


def test_the_command_goes_on_until_it_is_ended_and_tells_each_range(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(held), Applying(held), Catalog.open(held.definition.catalog.url) as catalog:
        until(lambda: _streams(held), "both tables in the lake")

        def end_when_done() -> None:
            until(lambda: len([one for one in catalog.verified.ls("held") if one.ended]) == 4, "a pass over all")
            os.kill(os.getpid(), signal.SIGTERM)

        ending = Thread(target=end_when_done)
        ending.start()
        status = main(["verify", "--every", "1h", "--rate", "100000", "--json", "-c", str(held.path)])
        ending.join()
        said = [json.loads(one) for one in capsys.readouterr().out.splitlines() if one.startswith('{"command"')]
        assert status == 0
        assert {(one["ok"], one["result"]["sink"]) for one in said} == {(True, "lake"), (True, "find")}
        assert verified(held, capsys)[0] == 0


NOW = datetime(2026, 1, 1, tzinfo=UTC)


def test_the_next_range_follows_the_last_one_of_a_pass_on_its_way_and_a_new_pass_waits_until_it_is_due() -> None:
    assert next_place([], NOW, 60) == PassStart(NOW)
    earlier = NOW - timedelta(seconds=59)
    on_its_way = [range_of(began=earlier, number=0, ended="5"), range_of(began=earlier, number=1, first="5", ended="9")]
    assert next_place([on_its_way], NOW, 60) == PassStart(earlier, 2, "9")
    done = [*on_its_way, range_of(began=earlier, number=2, first="9")]
    assert next_place([done], NOW, 60) is None
    assert next_place([done], NOW, 59) == PassStart(NOW)


def test_rows_come_no_faster_than_the_pace() -> None:
    slept: list[float] = []
    now = [100.0]
    pace = ReadRateLimit(10, clock=lambda: now[0], sleep=slept.append)
    for at, rows in ((100.0, 20), (101.0, 5), (110.0, 1)):
        now[0] = at
        pace.taken(rows)
    assert slept == pytest.approx([2.0, 1.5, 0.1])
    ReadRateLimit(None, sleep=slept.append).taken(10**9)
    assert len(slept) == 3


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--repair", "--against", "log"], "--repair reads the source, which"),
        (["--every", "1h", "--against", "log"], "--every reads the source, which"),
        (["--every", "soon"], "expected a duration"),
        (["--every", "0"], "expected at least 1s"),
        (["--every", "1h", "--rate=-5"], "--rate -5: expected at least 1"),
        (["--rate", "5"], "--rate requires --every"),
        (["--every", "1h", "--mode", "count"], "equal counts verify nothing"),
        (["--sink", "nowhere"], "unknown sink 'nowhere'"),
        (["--sink", "nowhere", "--against", "log"], "unknown sink 'nowhere'"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "version: 1\nname: held\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/gone'}\n"
        f"tables: [{{match: 'public.*'}}]\nlog: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{name: find, type: search, path: '{tmp_path}/find'}}]\n"
    )
    assert main(["verify", *options, "-c", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_mode_is_refused_with_those_that_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["verify", "--mode", "guess"])
    assert refused.value.code == 2
    assert "'rows', 'checksum', 'count'" in capsys.readouterr().err
