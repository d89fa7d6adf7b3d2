"""One small table of many: what is read for its changes out of the cold segments of a real log."""

from __future__ import annotations

import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log.disk_format import LogFile
from cdc.log.file_selection import TableSelection
from cdc.log.maintenance_worker import REWRITE_EVERY, RetentionWorker
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from tests.benchmarks.figures import Figure
from tests.benchmarks.log_reading import Rows
from tests.fixtures.spent import bytes_read
from tests.log.rows import IDENTITY, info

TABLES: Final = 1_000
COMMIT: Final = 10_000
"""Changes of a commit, each of which has some of every table."""
BATCHES: Final = 100
"""Different commits, written in turns: more than become one file, in which equal rows would hardly take room."""
_AS_CONFIGURED: Final = SegmentLimits(size=128 << 20, age=3600.0)
_QUIET: Final = 4 * REWRITE_EVERY
"""Seconds without another file rewritten, after which none will be."""


@dataclass(frozen=True, slots=True)
class Cold:
    """What is written, and where the figures go."""

    changes: int
    rows: Rows
    figures: dict[str, Figure]

    def measure(self) -> None:
        """Add the values of one run."""
        folder = Path(tempfile.mkdtemp(prefix="cdc-log-"))
        try:
            self._write(folder)
            self._read(folder)
        finally:
            shutil.rmtree(folder)

    def _write(self, folder: Path) -> None:
        """As a reader does, with what it settles beside."""
        batches = [_of_all_tables(self.rows(np.arange(n * COMMIT, (n + 1) * COMMIT))) for n in range(BATCHES)]
        writer = LogWriter.open(folder, IDENTITY, _AS_CONFIGURED)
        began = time.monotonic()
        with RetentionWorker(folder, Retention(max_age=1e9, grace=0.0), lambda: None) as trimmer:
            for number in range(self.changes // COMMIT):
                rows = batches[number % BATCHES]
                begins = int(writer.durable or 0) + 1
                positions = pc.add(pc.subtract(rows["position"], pc.min(rows["position"])), begins)
                own = rows.set_column(0, LOG_SCHEMA.field("position"), positions)
                writer.commit(writer.stage(own), info(pc.max(positions).as_py()))
                trimmer.commit_prepared(writer)
            self._add("cold_log_changes_per_second", self.changes / (time.monotonic() - began))
            files, since = cold_files(folder), time.monotonic()
            while time.monotonic() < since + _QUIET:
                trimmer.commit_prepared(writer)
                time.sleep(0.1)
                if len(found := cold_files(folder)) != len(files):
                    files, since = found, time.monotonic()

    def _read(self, folder: Path) -> None:
        files = cold_files(folder)
        upto, number = max(file.last for file in files), TABLES // 2
        before = bytes_read()
        found = LogReader(folder).rows(Position(0), upto, only=TableSelection(relations=(number, number)))
        rows = sum(batch.num_rows for batch in found)
        share = (bytes_read() - before) / sum(file.size for file in files)
        told = sum(file.rows for file in files) // TABLES
        if rows != told:
            raise RuntimeError(f"{rows} changes of a table that has {told}")
        self._add("pruned_read_share", share)
        self._add("cold_files", len(files))

    def _add(self, name: str, value: float) -> None:
        self.figures[name].values.append(value)


def figures() -> dict[str, Figure]:
    """What is measured, without values."""
    return {
        "pruned_read_share": Figure("ratio", at_most=0.02),
        "cold_files": Figure("files"),
        "cold_log_changes_per_second": Figure("changes/s"),
    }


def cold_files(folder: Path) -> list[LogFile]:
    """Of the segments that nobody writes to any more."""
    files = LogReader(folder).every_file()
    newest = max(file.segment for file in files)
    return [file for file in files if file.segment < newest]


def _of_all_tables(rows: pa.Table) -> pa.Table:
    """The changes as some of each of the many tables."""
    number = np.arange(rows.num_rows) % TABLES
    names = pa.array([f"shop.table{n}" for n in range(TABLES)])
    said = {"relation": pa.array(number), "topic": names.take(pa.array(number))}
    return pa.table([said.get(name, rows[name]) for name in LOG_SCHEMA.names], schema=LOG_SCHEMA)
