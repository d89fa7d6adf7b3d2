"""Dead letters beside a real server: what a target cannot take waits until people, or the source, have a word on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from typing import Any, Self

import pytest

from cdc import metrics
from cdc.catalog import Catalog
from cdc.errors import SinkUnavailable
from cdc.log.reader import LogReader
from cdc.snapshot.backfill_documents import BACKFILL
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.published_record import TableRecord
from cdc.targets.search_index_reader import SearchIndex
from pipelines.dead_letters.requests import DeadLetterCommands
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import ProgressReporter, SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.cli.command import Outcome, run
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.snapshot.reader_with_backfills import Running

LARGE = "repeat(md5('x'), 200)"
"""More than a page holds, uncompressed: an update that leaves it alone does not send it."""


class Lane:
    """The apply process' part for one sink, in a thread, without Spark; beats like a heartbeat."""

    def __init__(self, held: Captured) -> None:
        self._held, definition = held, held.definition
        self._catalog, self._stop = Catalog.open(definition.catalog.url), Event()
        (wanted,) = definition.sinks
        self.figures = metrics.Metrics()
        progress = SinkFigures(definition.name, wanted.name, self.figures)
        self._sink = build_sink(wanted)
        fold = RangeFolder(LogReader(definition.log.path), wanted.name, wanted.tables)
        self.loop = SinkLoop(self._sink, fold, CutRequests(self._catalog, definition.name), progress)
        self._orders = DeadLetterCommands(definition, self._catalog, progress)
        self._board = ProgressReporter(self._catalog, definition.name, self.figures, self._stop)
        self._board.sinks.append(progress)
        self._failures: list[BaseException] = []
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self.loop.open()
        self._thread.start()
        self._board.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._board.join()
        self.loop.drain()
        self._sink.close()
        self._catalog.close()
        assert not self._failures, self._failures

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                self.loop.advance()
                self._orders.process(self.loop.quarantine)
                if self.loop.quarantine.requested_relations:
                    self._held.wal_end()
        except BaseException as failure:
            self._failures.append(failure)


def captured(folder: Path, database: str, *statements: str, sink: str | None = None) -> Captured:
    run_sql(database, *statements)
    held = Captured(folder, database)
    with held.path.open("a") as definition:
        lake = f"{{name: lake, type: delta, path: '{folder}/lake/{{schema}}/{{table}}'}}"
        definition.write(f"sinks: [{sink or lake}]\n")
    held.copy()
    return held


def table(held: Captured) -> TableRecord | None:
    """As the sink last published it."""
    return next(iter(Lake.open(f"{held.folder}/lake/{{schema}}/{{table}}").tables()), None)


def rows(held: Captured) -> dict[int, Any]:
    """The second column by the first, of the published cut."""
    found = table(held)
    if found is None:
        return {}
    columns = read_target(found.target, found.version).read_all().to_pydict()
    return dict(zip(columns["id"], map(str, columns["v"]), strict=True))


def parked(held: Captured) -> Sequence[tuple[str, ...]]:
    found = table(held)
    return () if found is None else found.parked


FILTERED = (
    "CREATE TABLE t (id int, open bool, n int, v text, PRIMARY KEY (id, open))",
    "ALTER TABLE t ALTER COLUMN v SET STORAGE EXTERNAL",
    f"INSERT INTO t SELECT i, i % 2 = 0, 0, i || {LARGE} FROM generate_series(1, 20) i",
    "CREATE PUBLICATION cdc_held_pub FOR TABLE t WHERE (open)",
)


def test_a_row_that_comes_into_a_row_filter_without_its_large_value_is_asked_of_the_source(
    tmp_path: Path, database: str
) -> None:
    held = captured(tmp_path, database, *FILTERED)
    with Running(held) as running, Lane(held):
        running.until(lambda: set(rows(held)) == set(range(2, 21, 2)), "the first copy")
        running.until(lambda: (found := table(held)) and found.state == "streaming", "the end of the copy")
        run_sql(held.dsn, "UPDATE t SET open = true WHERE id = 7", "UPDATE t SET n = 1 WHERE id = 8")
        running.until(lambda: 7 in rows(held) and not parked(held), "the row of the source")
        asked = running.catalog.commands.ls("held", BACKFILL)
        found = table(held)

    assert found is not None
    assert found.state == "streaming"
    assert [command.payload["keys"] for command in asked if command.payload["keys"]] == [[["7", "t"]]]
    assert rows(held)[7] == "7" + rows(held)[8][1:]
    assert ("apply", "backfill") in {(line.actor, line.action) for line in _audit(held)}


def test_a_row_that_a_search_index_has_only_a_part_of_is_asked_of_the_source_and_the_others_go_on(
    tmp_path: Path, database: str
) -> None:
    held = captured(tmp_path, database, *FILTERED, sink=f"{{name: find, type: search, path: '{tmp_path}/find'}}")

    def found() -> dict[str | None, dict[str, str | None]]:
        with suppress(SinkUnavailable):
            return {row.key[0]: dict(row.source) for row in SearchIndex.open(tmp_path / "find").documents("public.t")}
        return {}

    def stands() -> tuple[str, Sequence[tuple[str, ...]]]:
        published = SearchIndex.open(tmp_path / "find").published
        assert published is not None
        (record,) = published.tables.values()
        return record.state, record.parked

    with Running(held) as running, Lane(held):
        running.until(lambda: len(found()) == 10 and stands()[0] == "streaming", "the first copy")
        run_sql(held.dsn, "UPDATE t SET open = true WHERE id = 7", "UPDATE t SET n = 1 WHERE id = 8")
        running.until(lambda: "7" in found() and not stands()[1], "the row of the source")
        asked = running.catalog.commands.ls("held", BACKFILL)

    assert [command.payload["keys"] for command in asked if command.payload["keys"]] == [[["7", "t"]]]
    rows = found()
    assert (rows["8"]["n"], stands()) == ("1", ("streaming", ()))
    assert rows["7"]["v"] == "7" + (rows["8"]["v"] or "")[1:]


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    return captured(
        tmp_path,
        database,
        "CREATE TABLE t (id int PRIMARY KEY, v numeric(6,2), note text)",
        "INSERT INTO t SELECT i, i, 'n' || i FROM generate_series(1, 9) i",
    )


@pytest.fixture(name="cdc")
def _cdc(held: Captured, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    def command(*arguments: object) -> Outcome:
        outcome = run(capsys, "dlq", *arguments, "-c", held.path, "--json")
        # the lane logs into the same output
        return replace(outcome, output=outcome.output.splitlines()[-1])

    return command


def test_people_list_show_retry_and_discard_what_is_parked(held: Captured, cdc: Callable[..., Outcome]) -> None:
    with Running(held) as running, Lane(held) as lane:
        running.until(lambda: len(rows(held)) == 9, "the first copy")
        run_sql(held.dsn, "UPDATE t SET v = 'NaN' WHERE id IN (2, 3)", "UPDATE t SET v = 44 WHERE id = 4")
        running.until(lambda: parked(held) == (("2",), ("3",)), "two keys aside")
        running.until(lambda: len(running.catalog.dead_letters.ls("held")) == 2, "the catalog's mirror")
        assert (rows(held)[2], rows(held)[4]) == ("2.00", "44.00")
        assert lane.figures.value(metrics.DLQ_RECORDS, "held", "lake") == 2
        second, third = cdc("ls").envelope["result"]["letters"]
        assert (second["sink"], second["table"], second["key"], second["code"]) == (
            "lake",
            "public.t",
            ["2"],
            "CDC-3001",
        )
        shown = cdc("show", second["id"][:5]).envelope["result"]
        assert (shown["row"], shown["attempts"], shown["complete"]) == ({"id": "2", "v": "NaN", "note": "n2"}, 1, True)

        tried = cdc("retry", second["id"])
        assert (tried.status, tried.envelope["result"]["letters"]) == (4, {second["id"]: "parked"})
        assert tried.envelope["summary"] == "requested to retry 1 of 2 dead letters, the target refused 1 again"
        assert cdc("show", second["id"]).envelope["result"]["attempts"] == 2
        forgotten = cdc("discard", third["id"], "--reason", "a test")
        assert (forgotten.status, forgotten.envelope["result"]["letters"]) == (0, {third["id"]: "discarded"})
        assert (parked(held), rows(held)[3]) == ((("2",),), "3.00")

        run_sql(held.dsn, "UPDATE t SET v = 22 WHERE id = 2")
        running.until(lambda: not parked(held), "a change that fits")
        running.until(lambda: not running.catalog.dead_letters.ls("held"), "the mirror is empty")
    assert rows(held)[2] == "22.00"
    assert [line.detail.get("reason") for line in _audit(held) if line.action == "dlq discard"] == ["a test"]


def test_a_letter_that_is_not_there_is_refused_with_those_that_are(held: Captured, cdc: Callable[..., Outcome]) -> None:
    with Catalog.open(held.definition.catalog.url):
        assert cdc("retry", "nope").status == 2
        assert cdc("retry").status == 2
        assert cdc("discard", "nope", "--reason", " ").status == 2
        assert cdc("ls").envelope["result"] == {"letters": []}


def _audit(held: Captured) -> list[Any]:
    with Catalog.open(held.definition.catalog.url) as catalog:
        return catalog.audit.ls()
