"""A captured table inside the test's own process: definition, copy, stream, and the log folded by hand."""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any, Final, Self

import pyarrow.compute as pc

from cdc.capture.decode_stage import StreamObservers
from cdc.capture.initial_snapshot import ensure_initial_snapshot
from cdc.capture.reader import Reader, ReaderContext
from cdc.capture.settings import reader_settings
from cdc.config import Definition, load_definition
from cdc.log.disk_format import LogIdentity
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.log_row import Operation
from cdc.lsn import Lsn
from cdc.metrics import Metrics
from cdc.position import Position
from cdc.postgres.logical_messages import emit_message
from cdc.postgres.replication import identify_system
from cdc.snapshot.debezium_signal_queue import SignalQueue
from cdc.snapshot.watermark_window import WatermarkWindows
from cdc.table import TableState
from tests.fixtures.catalog import put_catalog
from tests.fixtures.forked import start
from tests.fixtures.postgres import open_session, run_sql
from tests.fixtures.waiting import until


class Captured:
    """One database under one definition; several in one test may share a log folder but no slot."""

    def __init__(self, folder: Path, dsn: str, *, tables: str = "public.*", slot: str = "") -> None:
        self.dsn, self.folder = dsn, folder
        self.path = folder / "pipeline.yaml"
        put_catalog(folder)
        self.write(tables=tables, slot=slot or f"s_{dsn.rpartition('/')[2]}")

    def write(self, *, tables: str = "public.*", slot: str, more: str = "") -> None:
        """Write the definition anew."""
        self.path.write_text(
            f"version: 1\nname: held\nsource:\n  dsn: '{self.dsn}'\n  slot: {{name: {slot}}}\n{more}"
            f"tables: [{{match: '{tables}'}}]\nlog: {{path: '{self.folder}/log'}}\n"
        )

    @property
    def definition(self) -> Definition:
        """As the commands read it."""
        return load_definition(self.path)

    @property
    def slot(self) -> str:
        """Of the source."""
        return self.definition.source.slot.name

    @property
    def log(self) -> LogReader:
        """As it is now."""
        return LogReader(self.folder / "log")

    def copy(self) -> Position:
        """Begin the log."""
        settings = reader_settings(self.definition)
        settings.log.mkdir(exist_ok=True)
        found = identify_system(self.dsn)
        writer = LogWriter.open(
            settings.log, LogIdentity(system_id=found.system_id, database=found.database), settings.limits
        )
        ensure_initial_snapshot(settings.source, settings.log, writer, Metrics())
        assert writer.durable is not None
        return writer.durable

    def stream(self) -> Position:
        """Run the reader until the log holds everything that has committed by now, and end it."""
        with self.reading() as reading:
            reading.caught_up()
        return self.log.durable or Position(0)

    def reading(self) -> Reading:
        """A reader beside a block."""
        return Reading(self)

    def rows(self) -> list[dict[str, Any]]:
        """Every row of the log, in its order."""
        log = self.log
        found = [row for batch in log.rows(Position(0), log.durable or Position(0)) for row in batch.to_pylist()]
        return sorted(found, key=itemgetter("position", "ordinal"))

    def folded(self, table: str) -> list[tuple[str | None, ...]]:
        """The rows of a table as the log tells them, values as text in column order, sorted."""
        log = self.log
        schema = next(s for s in log.schemas().values() if s.name == table and s.state is not TableState.DROPPED)
        rows = fold(log, schema.relation)
        return sorted(tuple(row.get(column.id) for column in schema.columns) for row in rows)

    def relations_with_rows(self) -> set[int]:
        """Those of which a fold leaves something."""
        log = self.log
        return {relation for relation in log.schemas() if fold(log, relation)}

    def wal_end(self) -> Lsn:
        """A place behind all that has committed, and before a message that will get there."""
        conn = open_session(self.dsn)
        emit_message(conn, "cdc.test", "end")
        found = conn.execute("SELECT pg_current_wal_lsn()::text").fetchone()
        emit_message(conn, "cdc.test", "end")
        assert found is not None
        return Lsn.parse(found[0])

    def holds(self, end: Lsn) -> bool:
        """Whether the log has come there."""
        last = self.log.last_commit
        return last is not None and last.last.lsn >= end


def capture_table(folder: Path, dsn: str) -> Captured:
    """A pipeline whose log contains the copy of one empty table, `t (id int PRIMARY KEY)`."""
    run_sql(dsn, "CREATE TABLE t (id int PRIMARY KEY)")
    captured = Captured(folder, dsn)
    captured.copy()
    return captured


class Reading:
    """A reader in a thread of the test, beside a block; what it fails with, the block fails with."""

    def __init__(
        self, held: Captured, windows: WatermarkWindows | None = None, signals: SignalQueue | None = None
    ) -> None:
        """windows: a subclass that acts in every window."""
        self.held, self.windows = held, windows or WatermarkWindows()
        self.context = ReaderContext(observers=StreamObservers(self.windows, signals))
        self.figures, self.stop = self.context.metrics, self.context.stop
        self._failures: list[BaseException] = []
        self._settings = reader_settings(held.definition)  # as they are now, whatever the block makes of them
        self._reader = Thread(target=self._read)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop.set()
        self._reader.join()
        if self._failures:
            raise self._failures[0]

    @property
    def reads(self) -> bool:
        """Whether the reader runs."""
        return self._reader.is_alive()

    def until(self, condition: Callable[[], Any], what: str = "what was waited for") -> Any:
        """Wait until it holds, and give it; raises what the reader failed with before."""

        def asked() -> Any:
            if self._failures:
                raise self._failures[0]
            return condition()

        return until(asked, what)

    def caught_up(self) -> None:
        """Wait until the log holds everything that has committed by now."""
        end = self.held.wal_end()
        self.until(lambda: self.held.holds(end), f"{end} in the log")

    def _read(self) -> None:
        try:
            Reader(self._settings, self.context).run()
        except BaseException as failure:
            self._failures.append(failure)


class ReaderProcess:
    """`cdc reader` as a process; a context manager, which kills it."""

    COMMAND: tuple[str, ...] = ("reader",)

    def __init__(self, held: Captured) -> None:
        self._output = held.folder / "reader.out"
        with self._output.open("ab") as output:
            self.child = start("cdc", *self.COMMAND, "-c", held.path, output=output)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()

    def output(self) -> str:
        """What it printed."""
        return self._output.read_text()


class SupervisedReader(ReaderProcess):
    """A reader as the child of `cdc run`."""

    COMMAND = ("run", "--only", "reader")


FOLDED: Final = ("position", "ordinal", "op", "key", "old_key", "after", "partial", "payload")


def rows_with(log: LogReader, what: pc.Expression, *names: str) -> list[dict[str, Any]]:
    """Those rows of the log, with some of their columns, or with all; to make Python objects of others takes long."""
    batches = log.rows(Position(0), log.durable or Position(0))
    return [row for batch in batches for row in batch.filter(what).select(names or batch.schema.names).to_pylist()]


def fold(log: LogReader, relation: int) -> list[dict[int, str | None]]:
    """The image per key, partial ones laid over what was there; `t` empties, `g` takes what is older than it says."""
    found = rows_with(log, pc.field("relation") == relation, *FOLDED)
    state: dict[tuple[str, ...], tuple[int, dict[int, str | None]]] = {}
    left: dict[tuple[str, ...], dict[int, str | None]] = {}
    for row in sorted(found, key=itemgetter("position", "ordinal")):
        if row["op"] == Operation.TRUNCATE.value:
            state.clear()
        elif row["op"] == Operation.GENERATION.value:
            began = int(row["payload"])
            state = {key: held for key, held in state.items() if held[0] >= began}
        elif row["op"] == Operation.DELETE.value:
            left[tuple(row["key"])] = state.pop(tuple(row["key"]), (0, {}))[1]
        elif row["key"] is not None:
            key, base = tuple(row["key"]), dict[int, str | None]()
            if row["partial"]:
                base = left.get(tuple(row["old_key"]), {}) if row["old_key"] else state.get(key, (0, {}))[1]
            state[key] = row["position"], {**base, **dict(row["after"])}
    return [image for _, image in state.values()]
