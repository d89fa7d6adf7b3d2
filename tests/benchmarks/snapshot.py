"""Snapshot: a table's first copy into a fresh log against `COPY … TO STDOUT`, the stream meanwhile, and replay.

The clock of a copy begins with the reader's first COPY statement of the table, as the server tells it, and ends
when the commit with the table's `g` row stands on disk: neither Python's start nor compiled code's loading counts.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, Final

from cdc.log.reader import LogReader
from cdc.log_row import HEARTBEAT_PREFIX, Operation
from cdc.lsn import Lsn
from cdc.postgres import logical_messages
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot, slot_status
from tests.benchmarks import replay, workloads
from tests.benchmarks.commits import CopyEnd, lags
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import (
    SOURCE_SETTINGS,
    Reader,
    ReaderPlace,
    connections_for,
    copy_to_null,
    prepare,
    under_load,
    until,
)

ROWS: Final = 5_000_000
QUICK_ROWS: Final = 300_000
"""More than replay folds without Spark."""
PARALLEL: Final = (1, 2, 4)
"""Connections of the copies."""
RATE: Final = 500.0
"""Transactions per second beside the copy."""
ALONE_SECONDS: Final = 10.0
TOPIC: Final = "bench_mixed.items"
PARTS: Final = ("copy", "stream", "replay")
_BEGAN: Final = """
    SELECT extract(epoch FROM min(query_start))::float8 FROM pg_stat_activity
    WHERE pid <> pg_backend_pid() AND query LIKE 'COPY %bench_mixed%'
"""
_CHANGES: Final = (Operation.CREATE, Operation.UPDATE, Operation.DELETE)


@dataclass(frozen=True, slots=True)
class Copied:
    """One first copy."""

    place: ReaderPlace
    began: float
    """Unix time."""
    ended: float
    cpu_seconds: float
    """Of the reader meanwhile."""
    peak_rss_mib: float
    """Of the reader since it was started."""

    @property
    def seconds(self) -> float:
        """From the first COPY statement to the `g` row on disk."""
        return self.ended - self.began


def run(
    *, quick: bool, rows: int | None = None, runs: int | None = None, parts: Sequence[str] = PARTS
) -> tuple[int, dict[str, Figure]]:
    """(runs, figures by key); parts that are not asked for stay unmeasured."""
    rows, runs = rows or (QUICK_ROWS if quick else ROWS), runs or (1 if quick else 3)
    figures = empty_figures()
    with tempfile.TemporaryDirectory(prefix="cdc-bench-") as name:
        folder = Path(name)
        folder.chmod(0o755)  # the server runs as another user
        with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
            bench = Bench(server.dsn(), folder, figures, rows)
            for workload in (workloads.mixed(rows), workloads.tpcb(0)):
                prepare(server.dsn(), *workload.setup)
            for _ in range(runs):
                if "copy" in parts:
                    bench.copies()
                if "stream" in parts:
                    bench.stream(3.0 if quick else ALONE_SECONDS)
                if "replay" in parts:
                    bench.replay()
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    bars = {1: 2.0, 2: 1.6, 4: None}
    return {
        **{f"time_vs_copy.parallel_{n}": Figure("ratio", at_most=bar) for n, bar in bars.items()},
        "rss_mib": Figure("MiB", at_most=512),
        "stream_p99_ratio": Figure("ratio", at_most=2),
        "copy_seconds": Figure("s"),
        **{f"snapshot_seconds.parallel_{n}": Figure("s") for n in bars},
        **{f"snapshot_cpu_seconds.parallel_{n}": Figure("s") for n in bars},
        "snapshot_seconds.beside": Figure("s"),
        **{f"rss_mib.parallel_{n}": Figure("MiB") for n in bars},
        **{f"stream_p{cut}_ms.{when}": Figure("ms") for when in ("alone", "beside") for cut in (50, 99)},
        **replay.figures(),
    }


class Bench:
    """One server and everything that is measured on it."""

    def __init__(self, dsn: str, folder: Path, figures: Mapping[str, Figure], rows: int) -> None:
        self._dsn, self._folder, self._figures, self._rows = dsn, folder, figures, rows
        self._places = 0

    def copies(self) -> None:
        """The reader and psql taking turns, the reader with more and more connections."""
        for parallel in PARALLEL:
            seconds = copy_to_null(self._dsn, TOPIC)
            with self._first_copy("bench_mixed.*", parallel) as copied:
                pass
            shutil.rmtree(copied.place.folder)
            self._note("copy_seconds", seconds)
            self._note(f"time_vs_copy.parallel_{parallel}", copied.seconds / seconds)
            self._note(f"snapshot_seconds.parallel_{parallel}", copied.seconds)
            self._note(f"snapshot_cpu_seconds.parallel_{parallel}", copied.cpu_seconds)
            self._note(f"rss_mib.parallel_{parallel}", copied.peak_rss_mib)
            if parallel == PARALLEL[-1]:
                self._note("rss_mib", copied.peak_rss_mib)

    def stream(self, seconds: float) -> None:
        """Commit at the source to durable in the log, while the table is copied and, by the same reader, after."""
        with self._first_copy("bench_*.*", 2, load=self._trickle) as copied:
            self._catch_up(copied.place)
            began = time.time()
            with self._trickle():
                until(lambda: time.time() > began + seconds, seconds + 60)
            self._catch_up(copied.place)
        beside = lags(copied.place.log, _CHANGES, began=copied.began, ended=copied.ended)
        alone = lags(copied.place.log, _CHANGES, began=began)
        cuts = {"beside": quantiles(beside, n=100), "alone": quantiles(alone, n=100)}
        for when, found in cuts.items():
            self._note(f"stream_p50_ms.{when}", found[49])
            self._note(f"stream_p99_ms.{when}", found[98])
        self._note("snapshot_seconds.beside", copied.seconds)
        self._note("stream_p99_ratio", cuts["beside"][98] / cuts["alone"][98])
        shutil.rmtree(copied.place.folder)

    def replay(self) -> None:
        """The table's rows from the log into a new Delta table, then from that into another by Spark alone."""
        with self._first_copy("bench_mixed.*", 2, log=replay.log_settings(self._rows)) as copied:
            for key, value in replay.measured(copied.place, TOPIC, self._rows).items():
                self._note(key, value)
        shutil.rmtree(copied.place.folder)

    @contextmanager
    def _first_copy(
        self, tables: str, parallel: int, load: Callable[[], Any] | None = None, log: str = ""
    ) -> Iterator[Copied]:
        """A reader that has just copied into a new log, under load from the first COPY on; it runs in the block.

        log: further lines of what the definition says of the log.
        """
        place = self._place(tables, parallel, log)
        with connect(self._dsn) as conn:
            with Reader(place) as reader:
                until(lambda: reader.runs() and _began(conn), 120, pause=0.005)
                began, before = _began(conn), reader.usage()
                end = CopyEnd(place.log, TOPIC)
                with load() if load is not None else _nothing():
                    until(lambda: reader.runs() and end.look(), 900, pause=0.1)
                after = reader.usage()
                ended = end.look()
                assert began is not None
                assert ended is not None
                yield Copied(place, began, ended, after.cpu_seconds - before.cpu_seconds, after.peak_rss_mib)
            until(partial(_idle, conn, place.slot), 30)
            drop_slot(conn, place.slot)

    def _place(self, tables: str, parallel: int, log: str) -> ReaderPlace:
        self._places += 1
        name = f"snapshot{self._places}"
        folder = self._folder / name
        folder.mkdir()
        more = [
            *filter(None, [log]),
            f"snapshot: {{parallel: {parallel}, beside: 0}}",
            f"sinks: [{{type: delta, name: {replay.SINK}, path: '{folder}/{replay.SINK}/{{schema}}/{{table}}'}}]",
        ]
        return ReaderPlace(name, folder, self._dsn, tables, f"{name}_pub", "\n".join(more))

    def _trickle(self) -> AbstractContextManager[None]:
        """Transactions at RATE inside the block, committed synchronously, paced by the server itself."""
        return under_load(self._dsn, "bench_tpcb", RATE, seconds=0.2, connections=connections_for(RATE))

    def _catch_up(self, place: ReaderPlace) -> None:
        """Wait until the log holds all that is committed now."""
        with connect(self._dsn) as conn:
            row = conn.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
            logical_messages.emit_message(conn, HEARTBEAT_PREFIX, "benchmark")
        assert row is not None
        end = Lsn.parse(row[0])
        until(lambda: (LogReader(place.log).durable or 0) >= end, 120)

    def _note(self, key: str, value: float) -> None:
        self._figures[key].values.append(value)


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _began(conn: Any) -> float | None:
    """When the reader's first COPY of the table began, as long as its connection is there."""
    began: float | None = conn.execute(_BEGAN).fetchone()[0]
    return began


def _idle(conn: Any, slot: str) -> bool:
    status = slot_status(conn, slot)
    return status is None or not status.active
