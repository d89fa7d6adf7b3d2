"""The log: what it costs to keep it small."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.delta_protocol.checkpoints import HINT
from cdc.log.compacted_table import read_compacted_state
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.fenced_table import CHECKPOINT_EVERY
from cdc.log.maintenance_worker import RetentionWorker
from cdc.log.reader import LogReader
from cdc.log.trim_plan import Retention
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.runtime.spark_session import SparkSettings, spark_session
from tests.benchmarks import log_amplification, log_cold, log_reading
from tests.benchmarks.figures import Figure
from tests.log.rows import IDENTITY, info

PARTS = ("append", "compaction", "amplification", "reading", "cold")
CHANGES_MADE, KEYS, RUNS = 20_000_000, 2_000_000, 3
QUICK_CHANGES, QUICK_KEYS = 1_000_000, 100_000
COMMIT, TRANSACTION = 100_000, 10
"""Changes of a commit, and of a transaction in it."""
APPENDED, APPENDED_AT_ONCE, COMMITS = 10_000_000, 10_000, 100_000
"""Changes that are appended to a new log and to an old one, how many in a commit, and how many commits make it old."""
TURNS = 10
"""In so many parts each."""
OPENED = 20
"""Times: it takes some ten milliseconds, in which a machine is easily disturbed."""
STEADY = 300
"""Commits after which a log has as many files behind its last checkpoint as it will ever have."""
QUICK_APPENDED, QUICK_COMMITS = 500_000, 1_500
COLD, QUICK_COLD = 50_000_000, 5_000_000
"""Changes of a thousand tables, of which one is read."""
DELETED = 0.3
TABLES = 21
"""One large one, and twenty that share a tenth of the keys."""
SEGMENT = SegmentLimits(size=64 << 20, age=1e9)
AS_CONFIGURED = SegmentLimits(size=128 << 20, age=3600.0)
_PLAIN = {"compression": "lz4", "use_dictionary": ["relation", "topic", "op", "xid", "partial", "committed_at"]}
"""As the log's own files are written."""


def run(
    *, quick: bool, changes: int = 0, keys: int = 0, runs: int = 0, parts: Collection[str] = PARTS, commits: int = 0
) -> tuple[int, dict[str, Figure]]:
    """How often it ran, and the figures of the parts."""
    appended, commits = (QUICK_APPENDED if quick else APPENDED), commits or (QUICK_COMMITS if quick else COMMITS)
    changes = changes or (QUICK_CHANGES if quick else CHANGES_MADE)
    keys, runs = keys or (QUICK_KEYS if quick else KEYS), runs or (1 if quick else RUNS)
    figures = empty_figures()
    if "append" in parts:
        _append(min(appended, changes), commits, runs, figures)
    if "compaction" in parts:
        for seed in range(runs):
            _compaction(np.random.default_rng(seed), (changes, keys), figures)
    if "amplification" in parts:
        log_amplification.measure(runs, figures, quick=quick)
    if "reading" in parts:
        session = spark_session(SparkSettings(master="local[2]", download=False))
        try:
            for seed in range(runs):
                _reading(np.random.default_rng(seed), (changes, keys), figures).measure(session)
        finally:
            session.stop()
    if "cold" in parts:
        for seed in range(runs):
            _cold(np.random.default_rng(seed), QUICK_COLD if quick else COLD, figures).measure()
    return runs, figures


def empty_figures() -> dict[str, Figure]:
    """Return the figures without values."""
    return {
        "append_ratio_at_100k_commits": Figure("ratio", at_least=0.9),
        "append_changes_per_second": Figure("changes/s"),
        "append_p99_ms": Figure("ms"),
        "open_writer_ms": Figure("ms"),
        "open_reader_ms": Figure("ms"),
        "open_ratio_at_100k_commits": Figure("ratio", at_most=1.25),
        "compaction_rows_per_second": Figure("changes/s", at_least=200_000),
        "compaction_output_ratio": Figure("ratio", at_most=1.1),
        "compaction_peak_disk_ratio": Figure("ratio", at_most=2.5),
        "compaction_write_amplification": Figure("ratio", at_most=5),
        "compaction_seconds": Figure("s"),
        **log_amplification.figures(),
        **log_reading.figures(),
        **log_cold.figures(),
    }


def _append(changes: int, commits: int, runs: int, figures: dict[str, Figure]) -> None:
    """Of a log that is new in each run, and of one that was old before the first."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-log-"))
    keys = np.arange(APPENDED_AT_ONCE)
    large, small = (_rows(keys[:count], keys, keys < 0) for count in (APPENDED_AT_ONCE, TRANSACTION))
    try:
        with _kept(folder / "old") as log:
            _appended(*log, small, commits)
        for run in range(runs):
            _compare(folder / f"new{run}", folder / "old", large, changes // APPENDED_AT_ONCE // TURNS, figures)
    finally:
        shutil.rmtree(folder)


def _compare(new: Path, old: Path, rows: pa.Table, times: int, figures: dict[str, Figure]) -> None:
    """Append to both in turns: the machine is not equally fast all the time."""
    took: dict[Path, list[np.ndarray]] = {old: [], new: []}
    for _ in range(TURNS):
        for root, seconds in took.items():
            with _kept(root) as log:
                seconds.append(_appended(*log, rows, times))
    with _kept(new) as log:
        _appended(*log, rows.slice(0, TRANSACTION), STEADY)
    for root in took:
        _amid_checkpoints(root, rows.slice(0, TRANSACTION))
    opened, (writers, readers) = _opened(new, old)
    seconds_new, seconds_old = np.concatenate(took[new]), np.concatenate(took[old])
    for name, value in {
        "append_ratio_at_100k_commits": float(seconds_new.sum() / seconds_old.sum()),
        "append_changes_per_second": float(seconds_old.size * APPENDED_AT_ONCE / seconds_old.sum()),
        "append_p99_ms": float(np.quantile(seconds_old, 0.99)) * 1e3,
        "open_writer_ms": writers * 1e3,
        "open_reader_ms": readers * 1e3,
        "open_ratio_at_100k_commits": (writers + readers) / sum(opened),
    }.items():
        figures[name].values.append(value)


@contextmanager
def _kept(root: Path) -> Iterator[tuple[LogWriter, RetentionWorker]]:
    """A log's writer as in the reader's process: what is written beside is put in place between two commits."""
    writer = LogWriter.open(root, IDENTITY, AS_CONFIGURED)
    with RetentionWorker(root, Retention(max_age=1e9, grace=60.0), lambda: None) as trimmer:
        yield writer, trimmer


def _appended(writer: LogWriter, trimmer: RetentionWorker, rows: pa.Table, times: int) -> np.ndarray:
    """Seconds of each commit of the same rows, at new positions."""
    took = np.zeros(times)
    for number in range(times):
        begins = int(writer.durable or 0) + 1
        positions = pc.add(pc.subtract(rows["position"], rows["position"][0]), begins)
        own = rows.set_column(0, LOG_SCHEMA.field("position"), positions)
        began = time.perf_counter()
        writer.commit(writer.stage(own), info(own["position"][-1].as_py()))
        trimmer.commit_prepared(writer)
        took[number] = time.perf_counter() - began
    return took


def _amid_checkpoints(root: Path, rows: pa.Table) -> None:
    """Append until the log is half way between two checkpoints: to open it takes longer with each commit behind one."""
    hint = json.loads((root / CHANGES / "_delta_log" / HINT).read_bytes())
    since = LogReader(root).version - int(hint["version"])
    with _kept(root) as log:
        _appended(*log, rows, CHECKPOINT_EVERY - since + CHECKPOINT_EVERY // 2)


def _opened(*folders: Path) -> list[tuple[float, float]]:
    """For each log, seconds that a writer and a reader take until they stand where it ends: the least of many times."""
    took: dict[Path, tuple[list[float], list[float]]] = {folder: ([], []) for folder in folders}
    for _ in range(OPENED):  # in turns, as above
        for folder, (writers, readers) in took.items():
            writers.append(_seconds(partial(LogWriter, folder, AS_CONFIGURED)))
            readers.append(_seconds(partial(LogReader, folder)))
    return [(min(writers), min(readers)) for writers, readers in took.values()]


def _seconds(what: Callable[[], object]) -> float:
    began = time.perf_counter()
    what()
    return time.perf_counter() - began


def _reading(random: np.random.Generator, sizes: tuple[int, int], figures: dict[str, Figure]) -> log_reading.Reading:
    changes, keys = min(sizes[0], log_reading.CHANGES_READ), sizes[1]
    ids, gone = random.integers(0, keys, changes), random.random(changes) < DELETED
    return log_reading.Reading(changes, lambda numbers: _rows(numbers, ids, gone), figures)


def _cold(random: np.random.Generator, changes: int, figures: dict[str, Figure]) -> log_cold.Cold:
    count = log_cold.BATCHES * log_cold.COMMIT
    ids, gone = random.integers(0, KEYS, count), random.random(count) < DELETED
    return log_cold.Cold(changes, lambda numbers: _rows(numbers, ids, gone), figures)


def _compaction(random: np.random.Generator, sizes: tuple[int, int], figures: dict[str, Figure]) -> None:
    """As on one machine, where the apply process compacts by itself."""
    changes, keys = sizes
    ids, gone = random.integers(0, keys, changes), random.random(changes) < DELETED
    folder = Path(tempfile.mkdtemp(prefix="cdc-log-"))
    try:
        writer = LogWriter.open(folder, IDENTITY, SEGMENT)
        for rows in _commits(ids, gone):
            writer.commit(writer.stage(rows), info(rows["position"][-1].as_py()))
        # so that a merge belongs to it: what comes second is larger
        quarter = Position(_position(changes // 4 // COMMIT * COMMIT - 1))
        began = time.monotonic()
        first = compact(None, folder, upto=quarter, everything=True)
        second = compact(None, folder, everything=True)
        seconds = time.monotonic() - began
        found = read_compacted_state(folder)
        if found is None or second.merged < 2 or first.rows_in + second.rows_in != changes:
            raise RuntimeError(f"not all was compacted and merged: {first}, {second}")
        size, log_size = sum(run.size for run in found.runs), _bytes_under(folder / CHANGES)
        peak = log_size + _bytes_under(folder / COMPACTED)
        plain = _plainly_written(folder, ids, gone)
    finally:
        shutil.rmtree(folder)
    written = log_size + first.bytes_out + second.bytes_out + second.merged_bytes
    for name, value in {
        "compaction_rows_per_second": changes / seconds,
        "compaction_output_ratio": size / plain,
        "compaction_peak_disk_ratio": peak / log_size,
        "compaction_write_amplification": written / log_size,
        "compaction_seconds": seconds,
    }.items():
        figures[name].values.append(value)


def _commits(ids: np.ndarray, gone: np.ndarray) -> Iterator[pa.Table]:
    for start in range(0, len(ids), COMMIT):
        yield _rows(np.arange(start, min(start + COMMIT, len(ids))), ids, gone)


def _position(change: int) -> int:
    return 1_000 + change // TRANSACTION


def _rows(changes: np.ndarray, ids: np.ndarray, gone: np.ndarray) -> pa.Table:
    """Changes by number as the log holds them: a key, a counter, and two texts that no codec makes much smaller."""
    keys, deleted, count = ids[changes], gone[changes], len(changes)
    texts = pa.array(keys).cast(pa.string())
    table = np.where(keys % 10 == 0, 1 + keys // 10 % (TABLES - 1), 0)
    images = np.empty((count, 4), object)
    noise = (changes.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype(np.uint64)
    images[:, 0], images[:, 1] = texts.to_pylist(), pa.array(changes).cast(pa.string()).to_pylist()
    images[:, 2] = pa.array(noise).cast(pa.string()).to_pylist()
    images[:, 3] = pa.array(noise >> np.uint64(7)).cast(pa.string()).to_pylist()
    names = pa.array([f"shop.table{n}" for n in range(TABLES)])
    said = {
        "position": 1_000 + changes // TRANSACTION,
        "ordinal": changes % TRANSACTION,
        "xid": changes // TRANSACTION,
        "committed_at": pa.array(1_700_000_000_000_000 + changes // TRANSACTION * 1_000).cast(
            pa.timestamp("us", "UTC")
        ),
        "relation": 16_384 + table,
        "topic": names.take(pa.array(table)),
        "op": pc.if_else(pa.array(deleted), "d", "u"),
        "key": pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), texts),
        "before": _maps(deleted, images[:, :1]),
        "after": _maps(~deleted, images),
        "partial": np.zeros(count, bool),
    }
    columns = [said.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
    return pa.table(columns, names=LOG_SCHEMA.names).cast(LOG_SCHEMA)


def _maps(there: np.ndarray, images: np.ndarray) -> pa.MapArray:
    width = images.shape[1]
    offsets = np.concatenate(([0], np.cumsum(there * width))).astype(np.int32)
    absent = np.concatenate((~there, [False]))
    columns = pa.array(np.tile(np.arange(1, width + 1, dtype=np.int32), int(there.sum())))
    return pa.MapArray.from_arrays(
        pa.array(offsets, mask=absent), columns, pa.array(images[there].ravel(), pa.string())
    )


def _plainly_written(folder: Path, ids: np.ndarray, gone: np.ndarray) -> int:
    """Bytes of one Parquet file of the last change of every key, without old images, in the order of the log."""
    last = np.zeros(int(ids.max()) + 1, np.int64) - 1
    last[ids] = np.arange(len(ids))  # of places assigned twice the last one stays
    stays = np.sort(last[last >= 0])
    path = folder / "plain.parquet"
    with pq.ParquetWriter(path, LOG_SCHEMA, **_PLAIN) as plain:
        for start in range(0, len(stays), COMMIT):
            rows = _rows(stays[start : start + COMMIT], ids, gone)
            nothing = pa.nulls(rows.num_rows, LOG_SCHEMA.field("before").type)
            plain.write_table(
                rows.set_column(LOG_SCHEMA.get_field_index("before"), LOG_SCHEMA.field("before"), nothing)
            )
    return path.stat().st_size


def _bytes_under(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*.parquet") if "_delta_log" not in file.parts)
