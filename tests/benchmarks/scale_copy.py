"""First copy by executors: from the source to a published Delta target, against COPY over as many connections.

The clock of a copy begins with the first COPY statement of the table, as the server tells it, and ends when the
published record has the table at the end of its copy. Readers and executors are started before; their Python's start
does not count, as in the benchmark `snapshot`. By then each row is synced to the disk twice: as text in the log, and
typed in the target; COPY to /dev/null writes nothing. The compaction of the log does not count, because it waits until
the copy has ended.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cdc.catalog import Catalog
from cdc.config import load_definition
from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.postgres.connection import connect
from cdc.postgres.slot import drop_slot, slot_status
from cdc.snapshot.executor_copy_status import OFFER
from cdc.targets.lake_reader import Lake
from cdc.targets.published_record import TargetState
from tests.benchmarks.figures import Figure
from tests.benchmarks.peers import Reader, ReaderPlace, program, running_module, until

PATIENCE: Final = 7_200.0
"""Seconds of one copy."""
_BEGAN: Final = """
    SELECT extract(epoch FROM min(query_start))::float8 FROM pg_stat_activity
    WHERE application_name = 'cdc copy' AND query LIKE 'COPY %'
"""
_BLOCKS: Final = "SELECT pg_relation_size(%s::regclass) / current_setting('block_size')::int"


def figures() -> dict[str, Figure]:
    """What is measured here."""
    return {
        "copy_vs_copy": Figure("ratio", at_most=2.5),
        "copy_seconds.executors": Figure("s"),
        "copy_seconds.to_null": Figure("s"),
    }


@dataclass(frozen=True, slots=True)
class CopySetting:
    """What is copied, and how."""

    dsn: str
    topic: str
    """The table, as schema.table; it must not change meanwhile."""
    folder: Path
    """An empty directory for log, target and catalog."""
    connections: int = 2


def measure_copy(setting: CopySetting) -> dict[str, float]:
    """Copy the table both ways, and return the value of each figure. Raises RuntimeError if rows are missing."""
    to_null = copy_to_null(setting)
    by_executors = copy_by_executors(setting)
    return {
        "copy_vs_copy": by_executors / to_null,
        "copy_seconds.executors": by_executors,
        "copy_seconds.to_null": to_null,
    }


def copy_to_null(setting: CopySetting) -> float:
    """Seconds that psql takes to copy the table to /dev/null over all connections, each a range of its blocks."""
    with connect(setting.dsn) as conn:
        row = conn.execute(_BLOCKS, [setting.topic]).fetchone()
    assert row is not None
    share = row[0] // setting.connections + 1

    def copy(first: int) -> None:
        selected = f"SELECT * FROM {setting.topic} WHERE ctid >= '({first},0)' AND ctid < '({first + share},0)'"
        command = [program("psql"), "--no-psqlrc", "--dbname", setting.dsn, "--command", f"COPY ({selected}) TO STDOUT"]
        subprocess.run(command, check=True, timeout=PATIENCE, stdout=subprocess.DEVNULL)

    began = time.perf_counter()
    with ThreadPoolExecutor(setting.connections) as pool:
        list(pool.map(copy, range(0, share * setting.connections, share)))
    return time.perf_counter() - began


def copy_by_executors(setting: CopySetting) -> float:
    """Seconds from the first COPY of an executor until the target is published with all rows of the table."""
    place = _place(setting)
    config = place.write()
    definition = load_definition(config)
    sink = definition.sinks[0]
    assert isinstance(sink, DeltaSinkDefinition)
    with connect(setting.dsn) as conn, Catalog.open(definition.catalog.url) as catalog, ExitStack() as opened:
        connections = ("--connections", str(setting.connections))
        opened.enter_context(_slot_dropped(conn, place))
        opened.enter_context(
            running_module(setting.folder / "copy.out", "pipelines", "copy", *connections, "-c", str(config))
        )
        until(lambda: catalog.commands.pending(place.name, OFFER), 120)
        opened.enter_context(running_module(setting.folder / "apply.out", "pipelines", "apply", "-c", str(config)))
        reader = opened.enter_context(Reader(place))
        until(lambda: reader.runs() and _began(conn), 120, pause=0.005)
        began = _began(conn)
        assert began is not None
        until(lambda: reader.runs() and _is_published(sink), PATIENCE, pause=0.1)
        seconds = time.time() - began
        (expected,) = conn.execute(f"SELECT count(*) FROM {setting.topic}".encode()).fetchone() or (None,)
    lake = Lake.of(sink)
    found = sum(batch.num_rows for table in lake.tables() for batch in lake.read(table.target, table.version))
    if found != expected:
        raise RuntimeError(f"the target has {found:,} rows of {expected:,}")
    return seconds


def _place(setting: CopySetting) -> ReaderPlace:
    schema, folder = setting.topic.partition(".")[0], setting.folder
    more = [
        f"snapshot: {{parallel: {setting.connections}, beside: 0}}",
        f"sinks: [{{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'}}]",
        f"spark: {{master: 'local[{setting.connections}]', checkpoint: '{folder}/checkpoint'}}",
        f"catalog: {{url: 'sqlite:///{folder}/catalog.db'}}",
    ]
    name = f"scale{os.getpid()}"
    return ReaderPlace(name, folder, setting.dsn, f"{schema}.*", f"{name}_pub", "\n".join(more))


@contextmanager
def _slot_dropped(conn: Any, place: ReaderPlace) -> Iterator[None]:
    """Drop the slot of the pipeline after the block, once its reader has ended."""
    yield
    until(lambda: (status := slot_status(conn, place.slot)) is None or not status.active, 60)
    if slot_status(conn, place.slot) is not None:
        drop_slot(conn, place.slot)


def _began(conn: Any) -> float | None:
    began: float | None = conn.execute(_BEGAN).fetchone()[0]
    return began


def _is_published(sink: DeltaSinkDefinition) -> bool:
    """Whether the last published cut has the only table, completely copied."""
    record = Lake.of(sink).published()
    return (
        record is not None
        and bool(record.tables)
        and all(table.state == TargetState.STREAMING for table in record.tables.values())
    )
