"""Search freshness: commit in Postgres → searchable, through a `cdc run` with one search sink."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from threading import Event, Thread
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import SearchSinkDefinition
from cdc.log.reader import LogReader
from cdc.log_row import ROW_OPERATIONS
from cdc.position import Position
from cdc.postgres.connection import connect
from cdc.postgres.embedded_server import EmbeddedPostgres
from cdc.postgres.slot import drop_slot
from cdc.targets.published_record import Published, TargetState
from cdc.targets.search_index_reader import SearchIndex
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.sink_state import SinkState
from tests.benchmarks import workloads
from tests.benchmarks.peers import SOURCE_SETTINGS, ReaderPlace, prepare, running_module, under_load, until

RATE: Final = 125.0
"""Transactions per second of four changes each, over four tables."""
TABLES: Final = 4
ACCOUNTS: Final = 10_000
REACHED: Final = 0.95
"""Share of the rate that has to be committed."""
LOOK_EVERY: Final = 0.005
"""Seconds between two looks at the published record."""
_CHANGES: Final = pa.array(sorted(ROW_OPERATIONS))


def measure_freshness(folder: Path, engine: str, url: str, load: tuple[float, float]) -> float:
    """Return the median of all transactions in milliseconds. load: seconds before the measurement, and measured."""
    folder.mkdir()
    access = {"path": f"{folder}/index"} if engine == "tantivy" else {"server": {"url": url}}
    sink = {"type": "search", "name": "find", "engine": engine, **access}
    work = workloads.tpcb(0, ACCOUNTS)
    with EmbeddedPostgres(folder / "postgres", version=18, settings=SOURCE_SETTINGS, tcp=True) as server:
        prepare(server.dsn(), *work.setup)
        more = f"sinks: {json.dumps([sink])}\nservice: {{port: 0}}"
        place = ReaderPlace("fresh", folder, server.dsn(), f"{work.schema}.*", "fresh_pub", more)
        with _running(place) as process, SeenRecords(_record_of(sink)) as seen:
            until(lambda: _is_alive(process) and seen.streams(place.durable), 300)
            with under_load(server.dsn(), work.schema, RATE):
                time.sleep(load[0])
                began = time.time()
                time.sleep(load[1])
                ended = time.time()
            until(lambda: _is_alive(process) and seen.position >= (place.durable or 0), 120)
        lags = lags_of(place.log, seen, began, ended)
        with connect(server.dsn()) as conn:
            drop_slot(conn, place.slot)
    if len(lags) < REACHED * RATE * (ended - began):
        raise RuntimeError(f"only {len(lags)} transactions committed in {ended - began:.0f} s")
    return median(lags) * 1e3


def _record_of(sink: dict[str, Any]) -> Callable[[], Published | None]:
    """Return a function that reads the published record of a sink; it raises an error before the sink has an index."""
    definition = SearchSinkDefinition.model_validate(sink)
    if definition.engine == "tantivy":
        return lambda: SearchIndex.open(sink["path"]).published
    state = SinkState(SearchClient(definition.access, definition.engine), definition.name)

    def published() -> Published | None:
        found = state.published()
        return None if found is None else found[0].record

    return published


class SeenRecords:
    """When a reader of the sink first saw each published record; a thread looks all the time inside the block."""

    def __init__(
        self, record: Callable[[], Published | None], tables: int = TABLES, look_every: float = LOOK_EVERY
    ) -> None:
        """tables: number of tables that the sink has in the end. look_every: seconds between two looks."""
        self._record, self._tables, self._look_every, self._stop = record, tables, look_every, Event()
        self._thread = Thread(target=self._look, daemon=True)
        self._last: Published | None = None
        self.moments: list[float] = []
        """Seconds since 1970, of each record in `positions`."""
        self.positions: list[int] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def position(self) -> int:
        """Position of the last record."""
        return 0 if self._last is None else self._last.position

    def streams(self, durable: Position | None) -> bool:
        """Return whether all tables are copied, and the sink has published the whole log."""
        states = [] if self._last is None else [table.state for table in self._last.tables.values()]
        return states.count(TargetState.STREAMING) == self._tables and durable is not None and self.position >= durable

    def _look(self) -> None:
        while not self._stop.wait(self._look_every):
            try:
                record = self._record()
            except Exception:
                continue
            if record is not None and record.position > self.position:
                self.moments.append(time.time())
                self.positions.append(record.position)
            self._last = record or self._last


def lags_of(log: Path, seen: SeenRecords, began: float, ended: float) -> list[float]:
    """Return the seconds from commit to visible of each transaction that committed in between."""
    reader, committed = LogReader(log), dict[int, float]()
    for rows in reader.rows(Position(0), reader.durable or Position(0)):
        chosen = rows.filter(pc.is_in(rows["op"], _CHANGES))
        times = chosen["committed_at"].cast(pa.int64()).to_numpy() / 1e6
        committed |= dict(zip(chosen["position"].to_pylist(), times.tolist(), strict=True))
    wanted = [(position, at) for position, at in committed.items() if began <= at <= ended]
    places = np.searchsorted(seen.positions, [position for position, _ in wanted])
    return [seen.moments[place] - at for place, (_, at) in zip(places, wanted, strict=True)]


def _is_alive(process: subprocess.Popen[bytes]) -> bool:
    if process.poll() is not None:
        raise RuntimeError(f"cdc run ended with status {process.returncode}")
    return True


@contextmanager
def _running(place: ReaderPlace) -> Iterator[subprocess.Popen[bytes]]:
    """Run `cdc run` inside the block."""
    with running_module(place.folder / "run.out", "cdc", "run", "-c", str(place.write())) as process:
        yield process
