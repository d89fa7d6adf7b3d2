"""kill -9 while rows are parked: the next driver loses none of them, and parks none that has a place in the target."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from cdc.catalog import Catalog
from cdc.catalog.dead_letter_requests import DeadLetterAction, DeadLetterRequest, await_outcomes, request_action
from cdc.config.delta_sink import HistoryMode
from cdc.failpoint import VARIABLE
from tests.contracts.histories import MODELS, RELATION, kept
from tests.faults.parking_driver import BEGIN, END, HISTORY, drive
from tests.fixtures import forked
from tests.fixtures.pipeline import Pipeline
from tests.fixtures.postgres import run_sql
from tests.pipelines.dead_letters import parking_history
from tests.pipelines.dead_letters.sink_driver import Driver, SearchDriver

KILLED = -signal.SIGKILL
SLOW = ("delta_before_merge", "delta_after_merge", "delta_before_publish")
POINTS = ["after_park", *(pytest.param(point, marks=pytest.mark.slow) for point in SLOW)]


def killed(folder: Path, upto: int, point: str, kind: str = "delta") -> bool:
    """Whether a driver in a process of its own was killed there."""
    environment = {VARIABLE: point}
    return forked.run("tests.faults.parking_driver", folder, upto, kind, environment=environment).status == KILLED


@pytest.mark.parametrize("point", POINTS)
def test_a_driver_killed_while_it_parks_is_followed_by_one_that_ends_the_same(tmp_path: Path, point: str) -> None:
    assert killed(tmp_path, BEGIN, point)
    drive(tmp_path, BEGIN)
    assert (Driver(tmp_path).keys(), Driver(tmp_path).items()) == (["3", "4"], {"1": "a", "2": "b"})
    assert killed(tmp_path, 32, point)  # in another place than the next one cuts
    assert killed(tmp_path, END, point)
    drive(tmp_path, END)

    ended = Driver(tmp_path)
    assert ended.keys() == ["1", "9"]
    assert ended.rows() == {"1": ("a", "1.00"), "2": ("B", "1.00"), "4": ("d", "4.00")}
    assert [(row.key, row.complete, row.place) for row in ended.quarantine.rows] == [
        (("1",), True, (30, 0)),
        (("9",), False, (34, 0)),
    ]


@pytest.mark.parametrize("point", ["after_park", "search_before_commit", "search_after_commit"])
def test_a_driver_of_a_search_index_killed_while_it_parks_is_followed_by_one_that_ends_the_same(
    tmp_path: Path, point: str
) -> None:
    drive(tmp_path, BEGIN, "search")
    assert killed(tmp_path, END, point, "search")
    drive(tmp_path, END, "search")

    ended = SearchDriver(tmp_path)
    assert ended.keys() == ["9"]
    assert ended.items() == {"1": "A", "2": "B", "4": "d"}
    assert [(row.complete, row.place, row.attempts) for row in ended.quarantine.rows] == [(False, (34, 0), 1)]
    ended.sink.close()


@pytest.mark.parametrize(
    ("kind", "point"),
    [
        ("scd2", "after_park"),
        ("soft_delete", "delta_after_ending"),
        ("append", "delta_after_merge"),
        *(pytest.param("scd2", point, marks=pytest.mark.slow) for point in (*SLOW, "delta_after_ending")),
        pytest.param("soft_delete", "delta_after_merge", marks=pytest.mark.slow),
        *(pytest.param("append", point, marks=pytest.mark.slow) for point in SLOW if point != "delta_after_merge"),
    ],
)
def test_a_history_with_parked_keys_is_whole_wherever_its_driver_was_killed(
    tmp_path: Path, kind: str, point: str
) -> None:
    for upto, of, parked in [(20, kind, ["1"]), (40, kind, ["1"]), (60, f"{kind}+", [])]:
        if upto > 20:
            assert killed(tmp_path, upto, point, of)
        drive(tmp_path, upto, of)
        assert [
            key for (key,) in parking_history.open_parking_sink(tmp_path, HistoryMode(kind)).tables[RELATION].parked
        ] == parked

    ended = parking_history.open_parking_sink(tmp_path, HistoryMode(kind), **parking_history.AS_TEXT)
    assert kept(ended, HistoryMode(kind)) == MODELS[HistoryMode(kind)](HISTORY)


@pytest.mark.slow
def test_the_apply_process_parks_and_shows_what_it_parked_again_after_kill_9(pipeline: Pipeline) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v numeric(6,2))",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 9) i",
    )
    lake = f"{{type: delta, name: lake, path: '{pipeline.folder}/lake/{{schema}}/{{table}}'}}"
    pipeline.write(tables="public.t", sinks=f"[{lake}]")
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        pipeline.reader()
        pipeline.wait_for_copy()
        driver = pipeline.apply("after_park")
        run_sql(pipeline.dsn, "UPDATE t SET v = 'NaN' WHERE id IN (2, 3)")
        pipeline.wait(lambda: driver.poll() == KILLED, "the driver dies while it parks")
        pipeline.apply()
        pipeline.wait(lambda: len(catalog.dead_letters.ls(pipeline.name)) == 2, "two letters")
        run_sql(pipeline.dsn, "UPDATE t SET v = 2 WHERE id = 2", "DELETE FROM t WHERE id = 3")
        pipeline.wait(lambda: not catalog.dead_letters.ls(pipeline.name), "none")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"


@pytest.mark.slow
def test_the_apply_process_parks_a_key_of_a_history_until_it_is_discarded(pipeline: Pipeline) -> None:
    run_sql(
        pipeline.dsn,
        "CREATE TABLE t (id int PRIMARY KEY, v numeric(6,2))",
        "INSERT INTO t SELECT i, i FROM generate_series(1, 9) i",
    )
    path = f"'{pipeline.folder}/lake/{{schema}}/{{table}}'"
    pipeline.write(tables="public.t", sinks=f"[{{type: delta, name: lake, stored_as_scd_type: 2, path: {path}}}]")
    with Catalog.open(f"sqlite:///{pipeline.folder}/catalog.db") as catalog:
        pipeline.reader()
        pipeline.wait_for_copy()
        pipeline.apply()
        run_sql(pipeline.dsn, "UPDATE t SET v = 'NaN' WHERE id = 2")
        pipeline.wait(lambda: len(catalog.dead_letters.ls(pipeline.name)) == 1, "one letter")
        run_sql(pipeline.dsn, "UPDATE t SET v = 2 WHERE id = 2", "UPDATE t SET v = 7 WHERE id = 3")
        envelope = pipeline.verify()
        assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
        (letter,) = catalog.dead_letters.ls(pipeline.name)
        (asked,) = request_action(
            catalog, pipeline.name, [letter], DeadLetterRequest(DeadLetterAction.DISCARD, "a test", "a test")
        )
        pipeline.wait(lambda: not catalog.dead_letters.ls(pipeline.name), "none")
        assert await_outcomes(catalog, [asked]) == {letter.id: "discarded"}
        run_sql(pipeline.dsn, "UPDATE t SET v = 9 WHERE id = 2")
    envelope = pipeline.verify()
    assert envelope["ok"], f"{envelope}\n{pipeline.output()}"
