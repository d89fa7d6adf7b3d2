"""A captured database whose sinks are applied in a thread, and changes of another client to their targets."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
from cdc.log.reader import LogReader
from cdc.targets.search_index_reader import document_id, layout
from pipelines.__main__ import main
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from pipelines.sinks.contract import Sink
from tests.faults.capture import Captured


class ApplyThread:
    """The apply process of a definition in a thread, without Spark; `resting` lets go of the sinks for a while."""

    def __init__(self, captured: Captured, reports: Sequence[str] = ("apply", "reader")) -> None:
        """reports: the processes that are said to run."""
        self._reports = reports
        self._definition, self._catalog = captured.definition, Catalog.open(captured.definition.catalog.url)
        self._stop, self._turn = Event(), RLock()
        self._sinks: list[tuple[SinkLoop, Sink]] = []
        self._failures: list[BaseException] = []
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._open()
        self._report()
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
            fold = RangeFolder(LogReader(self._definition.log.path), wanted.name, wanted.tables, wanted.keeps_history)
            loop = SinkLoop(
                sink, fold, CutRequests(self._catalog, name), SinkFigures(name, wanted.name, metrics.Metrics())
            )
            loop.open()
            self._sinks.append((loop, sink))

    def _close(self) -> None:
        for loop, sink in self._sinks:
            loop.drain()
            sink.close()
        self._sinks.clear()

    def _report(self) -> None:
        for process in self._reports:
            self._catalog.processes.report(ProcessReport(self._definition.name, process, 1, "running"))

    def _run(self) -> None:
        try:
            while not self._stop.wait(0.05):
                self._report()
                with self._turn:
                    for loop, _ in self._sinks:
                        loop.advance()
        except BaseException as failure:
            self._failures.append(failure)


def capture_with_sinks(folder: Path, database: str) -> Captured:
    """What is in the database, copied; to be applied to a lake and an index."""
    captured = Captured(folder, database)
    with captured.path.open("a") as definition:
        definition.write(
            f"sinks:\n- {{name: lake, type: delta, path: '{folder}/lake/{{schema}}/{{table}}'}}\n"
            f"- {{name: find, type: search, path: '{folder}/find', tables: [public.t, public.u]}}\n"
        )
    captured.copy()
    return captured


def spoil_lake(captured: Captured) -> None:
    """Rows removed, changed, and added with a place and without one."""
    t = DeltaTable(str(captured.folder / "lake" / "public" / "t"))
    t.delete("id IN (7, 8, 300)")
    t.update(updates={"v": "'bad'"}, predicate="id = 9 OR id = 301")
    row = pa.table(t.scan(predicate="id = 10"))
    for number, position in ((-1, 5), (-2, None)):
        stray = row.set_column(0, "id", pa.array([number], pa.int32()))
        place = stray.schema.get_field_index("_position")
        write_deltalake(t, stray.set_column(place, "_position", pa.array([position], pa.int64())), mode="append")
    DeltaTable(str(captured.folder / "lake" / "public" / "u")).update(
        updates={"v": "'bad'"}, predicate="place > 0.65 AND place < 0.75"
    )


STRAY = {("20", "5.00"): None, ("21", "5.25"): "bad", ("9999", "1.00"): "bad"}
"""A document removed, one changed, one of a row that never was."""


def spoil_index(captured: Captured, documents: Mapping[tuple[str, str], str | None]) -> None:
    """By key what is put there; None takes one away."""
    relation = next(s.relation for s in captured.log.schemas().values() if s.name == "t")
    index = tantivy.Index(layout(), str(captured.folder / "find"))
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


def run_verify(captured: Captured, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    status = main(["verify", *options, "--json", "-c", str(captured.path)])
    said = [text for text in capsys.readouterr().out.splitlines() if text.startswith('{"command"')]
    found: dict[str, Any] = json.loads(said[-1])
    return status, found
