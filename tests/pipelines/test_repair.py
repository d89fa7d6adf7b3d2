"""verify --repair: what another hand did to a target is undone row by row, while the source and the sinks go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, RLock, Thread
from typing import Any, Self

import pyarrow as pa
import pytest
import tantivy
from deltalake import DeltaTable, write_deltalake

from cdc import metrics
from cdc.catalog import Catalog, ProcessReport
from cdc.log.read import LogReader
from cdc.postgres.connection import connect
from cdc.snapshot.jobs import BACKFILL
from cdc.stores.search import document_id, layout
from pipelines.__main__ import main
from pipelines.apply import SinkLoop
from pipelines.cuts import Cuts
from pipelines.driver import build_sink
from pipelines.folding import RangeFold
from pipelines.progress import Progress
from pipelines.proof.compare import LISTED
from pipelines.sinks.sink import Sink
from tests.faults.capture import Captured
from tests.fixtures.postgres import run_sql
from tests.snapshot.running import Running


class Applying:
    """The apply process of a definition in a thread, without Spark; `resting` lets go of the sinks for a while."""

    def __init__(self, held: Captured, reports: Sequence[str] = ("apply", "reader")) -> None:
        """reports: the processes that are said to run."""
        self._reports = reports
        self._definition, self._catalog = held.definition, Catalog.open(held.definition.catalog.url)
        self._stop, self._turn = Event(), RLock()
        self._sinks: list[tuple[SinkLoop, Sink]] = []
        self._failures: list[BaseException] = []
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._open()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._close()
        self._catalog.close()
        assert not self._failures, self._failures

    @contextmanager
    def resting(self) -> Iterator[None]:
        with self._turn:
            self._close()
            yield
            self._open()

    def _open(self) -> None:
        name = self._definition.name
        for wanted in self._definition.sinks:
            sink = build_sink(wanted)
            fold = RangeFold(LogReader(self._definition.log.path), wanted.name, wanted.tables)
            loop = SinkLoop(sink, fold, Cuts(self._catalog, name), Progress(name, wanted.name, metrics.Figures()))
            loop.open()
            self._sinks.append((loop, sink))

    def _close(self) -> None:
        for loop, sink in self._sinks:
            loop.drain()
            sink.close()
        self._sinks.clear()

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                for process in self._reports:
                    self._catalog.processes.report(ProcessReport(self._definition.name, process, 1, "running"))
                with self._turn:
                    for loop, _ in self._sinks:
                        loop.advance()
        except BaseException as failure:
            self._failures.append(failure)


@pytest.fixture(name="held")
def _held(tmp_path: Path, database: str) -> Captured:
    """Two tables, one with a key of two columns, in a lake and an index."""
    run_sql(
        database,
        "CREATE TABLE t (id int, part numeric(6,2), born timestamptz, v text, PRIMARY KEY (id, part))",
        "INSERT INTO t SELECT i, i / 4.0, '2026-01-01Z'::timestamptz + i * interval '1 s', 'v' || i"
        " FROM generate_series(1, 400) i",
        "CREATE TABLE u (place float8 PRIMARY KEY, v text)",
        "INSERT INTO u SELECT i / 10.0, 'v' || i FROM generate_series(1, 10100) i",
    )
    held = Captured(tmp_path, database)
    with held.path.open("a") as definition:
        definition.write(
            f"sinks:\n- {{name: lake, type: delta, path: '{tmp_path}/lake/{{schema}}/{{table}}'}}\n"
            f"- {{name: find, type: search, path: '{tmp_path}/find'}}\n"
        )
    held.copy()
    return held


def spoil_lake(held: Captured) -> None:
    """Rows removed, changed, and added with a place and without one."""
    t = DeltaTable(str(held.folder / "lake" / "public" / "t"))
    t.delete("id IN (7, 8, 300)")
    t.update(updates={"v": "'bad'"}, predicate="id = 9 OR id = 301")
    row = t.to_pyarrow_table(filters=[("id", "=", 10)])
    for number, position in ((-1, 5), (-2, None)):
        stray = row.set_column(0, "id", pa.array([number], pa.int32()))
        place = stray.schema.get_field_index("_position")
        write_deltalake(t, stray.set_column(place, "_position", pa.array([position], pa.int64())), mode="append")
    DeltaTable(str(held.folder / "lake" / "public" / "u")).update(
        updates={"v": "'bad'"}, predicate="place > 0.65 AND place < 0.75"
    )


STRAY = {("20", "5.00"): None, ("21", "5.25"): "bad", ("9999", "1.00"): "bad"}
"""A document removed, one changed, one of a row that never was."""


def spoil_index(held: Captured, documents: Mapping[tuple[str, str], str | None]) -> None:
    """By key what is put there; None takes one away."""
    relation = next(s.relation for s in held.log.schemas().values() if s.name == "t")
    index = tantivy.Index(layout(), str(held.folder / "find"))
    writer: Any = index.writer(heap_size=32 << 20, num_threads=1)
    for key, image in documents.items():
        identity = document_id(relation, key)
        writer.delete_documents_by_term("_id", identity)
        if image is not None:
            document = tantivy.Document()
            document.add_text("_id", identity)
            document.add_unsigned("_relation", relation)
            document.add_text("_topic", "public.t")
            document.add_bytes("_key", json.dumps(key).encode())
            document.add_unsigned("_position", 5)
            document.add_unsigned("_ordinal", 0)
            document.add_bytes("_image", json.dumps({"1": key[0], "2": key[1], "3": None, "4": image}).encode())
            writer.add_document(document)
    writer.commit()
    del writer


@contextmanager
def workload(dsn: str) -> Iterator[Callable[[], int]]:
    """Changes all over table t, those rows that were spoiled included, until the block ends; gives their number."""
    done, count = Event(), [0]

    def write() -> None:
        with connect(dsn) as conn:
            while not done.wait(0.005):
                count[0] = number = count[0] + 1
                conn.execute("UPDATE t SET v = %s WHERE id = %s", [f"w{number}", 290 + number % 60])
                conn.execute("DELETE FROM t WHERE id = %s", [1000 + number - 50])
                conn.execute("INSERT INTO t VALUES (%s, %s, now(), 'new')", [1000 + number, number])
                conn.execute("UPDATE t SET part = part + 100 WHERE id = %s AND part < 200", [200 + number % 150])

    writer = Thread(target=write)
    writer.start()
    try:
        yield lambda: count[0]
    finally:
        done.set()
        writer.join()


def verified(held: Captured, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", *options, "--json", "-c", str(held.path)])
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith('{"command"')]
    found: dict[str, Any] = json.loads(said[-1])
    return status, found


def test_rows_that_another_hand_removed_added_and_changed_are_mended_while_all_goes_on(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(held) as running, Applying(held) as applying, workload(held.dsn) as written:
        running.until(lambda: written() > 50)
        with applying.resting():
            spoil_lake(held)
            spoil_index(held, STRAY)
        before = written()
        status, found = verified(held, capsys, "--repair")
        assert (status, found["ok"]) == (0, True), found
        running.until(lambda: written() > before + 50)
        status, after = verified(held, capsys)
        assert (status, after["ok"]) == (0, True), after
        asked = running.catalog.commands.ls("held", BACKFILL)
    mended = {(one["sink"], one["topic"]): one for one in found["result"]["repaired"]["tables"]}
    assert mended.keys() == {("lake", "public.t"), ("lake", "public.u"), ("find", "public.t")}
    # rows of the workload may have healed by themselves
    lake, index = mended["lake", "public.t"], mended["find", "public.t"]
    assert (lake["extra"], lake["missing"] >= 2, lake["differing"] >= 1) == (2, True, True)
    assert (index["extra"], index["missing"], index["differing"]) == (1, 1, 1)
    assert all(one["equal"] and one["keys"] for one in mended.values())
    numbers = sorted(number for one in mended.values() for number in one["backfills"])
    assert {command.payload["sink"] for command in asked if command.id in numbers} == {"lake", "find"}
    assert all(table["equal"] for table in found["result"]["tables"])
    assert len(found["result"]["tables"]) == 4


def test_nothing_is_asked_for_what_is_equal_and_what_cannot_be_mended_is_said_with_the_way_out(
    held: Captured, capsys: pytest.CaptureFixture[str]
) -> None:
    with Running(held) as running, Applying(held) as applying:
        running.until(lambda: verified(held, capsys)[0] == 0)
        status, found = verified(held, capsys, "--repair")
        assert (status, found["result"]["repaired"]) == (0, {"position": None, "tables": []})
        with applying.resting():
            t, u = (str(held.folder / "lake" / "public" / name) for name in "tu")
            row = DeltaTable(t).to_pyarrow_table(filters=[("id", "=", 10)])
            write_deltalake(t, row, mode="append")  # a key twice: both are replaced, none goes
            DeltaTable(u).delete()
            spoil_index(held, {("x", "1.00"): "bad"})
        status, found = verified(held, capsys, "--repair")
        mended = {(one["sink"], one["topic"]): one for one in found["result"]["repaired"]["tables"]}
        assert (status, found["error"]["code"]) == (4, "CDC-6001")
        twice = mended["lake", "public.t"]
        assert (twice["equal"], twice["keys"], twice["extra"], twice["reason"]) == (False, 1, 1, None)
        assert mended["lake", "public.u"]["reason"] == (
            "more than 10,000 keys differ → cdc replay lake --tables 'public.u'"
        )
        no_key = mended["find", "public.t"]["reason"]
        assert no_key.startswith("the key 'x,1.00' does not fit 'public.t'")
        assert no_key.endswith("→ cdc replay find")
        assert all(len(table["missing"]) <= LISTED for table in found["result"]["tables"])
        assert running.catalog.commands.pending("held", BACKFILL) == []
        assert main(["verify", "t", "--sink", "lake", "--repair", "-c", str(held.path)]) == 4
        assert "lake public.t: 1 keys read again, still not equal" in capsys.readouterr().out


def test_without_a_reader_nothing_is_asked(held: Captured, capsys: pytest.CaptureFixture[str]) -> None:
    """It runs, but does not say so."""
    with Running(held) as running, Applying(held, reports=("apply",)) as applying:
        running.until(lambda: verified(held, capsys)[0] == 0)
        with applying.resting():
            spoil_index(held, STRAY)
        status, found = verified(held, capsys, "--repair")
    assert (status, found["error"]["code"]) == (1, "CDC-5003")
