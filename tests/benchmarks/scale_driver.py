"""The driver's own work for one micro-batch of many files: it plans the tasks and commits the files that they wrote.

The entries of the files are simulated, so no task runs. Planning goes from the log's commit to the pickled tasks:
refresh of the log, end of the batch, files of the range, groups of files. Committing goes from the files that the tasks
report, one each, to the next version of a target that has as many files as the log, all of which get a new deletion
vector. Spark's scheduling is not included.
"""

from __future__ import annotations

import json
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import numpy as np
from pyroaring import BitMap

from cdc.delta_protocol.deletion_vectors import encode
from cdc.delta_protocol.table_storage import storage_of
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.table import TableSchema
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget, TxnMarker
from pipelines.sinks.delta.executor_key_search import NewVector
from pipelines.sinks.delta.executor_upsert import commit_upsert, is_older
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.new_data_files import DataFile
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from pipelines.source.options import SourceOptions
from pipelines.source.read_tasks import MOST_BYTES, Frame, plan_tasks
from tests.benchmarks.apply_input import ITEMS, Changes
from tests.benchmarks.figures import Figure

FILES: Final = 10_000
FILES_PER_TASK: Final = 10
FEWER: Final = 10
"""The micro-batch with which the large one is compared has so many times fewer files and tasks."""
ROWS_OF_FILE: Final = 100_000


def figures() -> dict[str, Figure]:
    """Return the figures that are measured here."""
    return {
        "driver_seconds_10k_files": Figure("s", at_most=2),
        "driver_seconds_1k_files": Figure("s"),
        "plan_seconds_10k_files": Figure("s"),
        "commit_seconds_10k_files": Figure("s"),
        "driver_seconds_10k_vs_1k": Figure("ratio", at_most=FEWER * 1.2),
    }


def measure(noted: dict[str, Figure]) -> None:
    """Plan and commit micro-batches of 10,000 and of 1,000 files."""
    small_plan, small_commit = _seconds(FILES // FEWER)
    plan, commit = _seconds(FILES)
    for key, value in {
        "driver_seconds_10k_files": plan + commit,
        "driver_seconds_1k_files": small_plan + small_commit,
        "plan_seconds_10k_files": plan,
        "commit_seconds_10k_files": commit,
        "driver_seconds_10k_vs_1k": (plan + commit) / (small_plan + small_commit),
    }.items():
        noted[key].values.append(value)


def _seconds(files: int) -> tuple[float, float]:
    """Return the seconds of planning and of committing a micro-batch of so many files."""
    with tempfile.TemporaryDirectory(prefix="cdc-driver-") as name:
        folder = Path(name)
        log = Changes.random(np.random.default_rng(0), 100, 900).log(folder)
        reader = LogReader(log)
        after = reader.durable or Position(0)
        _append_entries(log, after, files)
        began = time.perf_counter()
        tasks = _plan(reader, after)
        planned = time.perf_counter() - began
        if tasks != files // FILES_PER_TASK:
            raise RuntimeError(f"{tasks} tasks instead of {files // FILES_PER_TASK}")
        target = _target(folder, files)
        written = [_written_file(number) for number in range(files, files + tasks)]
        vectors = [_written_vector(number) for number in range(files)]
        began = time.perf_counter()
        live = LiveFiles.read(storage_of(target.uri), with_vectors=False)
        if not all(is_older(file, files * ROWS_OF_FILE) for file in live.by_path.values()):
            raise RuntimeError("the files of the target do not say that they are older")
        commit_upsert(target, live, vectors, written, TxnMarker(target.app_id, int(after) + 1))
        return planned, time.perf_counter() - began


def _plan(reader: LogReader, after: Position) -> int:
    """Plan the tasks of all that the log has after a position, and return how many there are."""
    reader.refresh()
    upto = reader.latest_boundary(after, None)
    tasks = plan_tasks(reader, Frame(options=SourceOptions(path="", tables=("*.*",))), after, upto)
    return sum(1 for task in tasks if pickle.dumps(task))


def _append_entries(log: Path, after: Position, files: int) -> None:
    """Append a commit of files that do not exist, as the last commit of the log says of its file."""
    commits = sorted((log / "changes" / "_delta_log").glob("*.json"))
    actions = [json.loads(line) for line in commits[-1].read_text(encoding="utf-8").splitlines()]
    file = next(action["add"] for action in actions if "add" in action)
    last = Position(int(after) + files)
    lines: list[dict[str, Any]] = [{"add": _entry(file, int(after) + 1 + number, number)} for number in range(files)]
    for action in actions:
        if "commitInfo" in action:
            action["commitInfo"]["cdc.last"] = str(last)
            lines.insert(0, action)
        if "txn" in action:
            action["txn"]["version"] = int(last)
            lines.append(action)
    text = "\n".join(json.dumps(line) for line in lines)
    commits[-1].with_name(f"{int(commits[-1].stem) + 1:020}.json").write_text(text, encoding="utf-8")


def _entry(file: dict[str, Any], position: int, number: int) -> dict[str, Any]:
    statistics = json.loads(file["stats"])
    statistics["numRecords"] = ROWS_OF_FILE
    statistics["minValues"]["position"] = statistics["maxValues"]["position"] = position
    path = f"{file['path'].rpartition('/')[0]}/simulated-{number}.parquet"
    return {**file, "path": path, "size": MOST_BYTES // FILES_PER_TASK, "stats": json.dumps(statistics)}


def _target(folder: Path, files: int) -> DeltaTarget:
    """Open a new target, and add so many files that do not exist."""
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/lake/{{schema}}/{{table}}", Writer.COPY_ON_WRITE))
    sink.open("bench")
    target = DeltaTarget.open(sink.apply(_empty_batch(ITEMS)).target)
    assert target is not None
    target.add([_written_file(number).add_action() for number in range(files)], target.commit(1))
    return target


def _empty_batch(schema: TableSchema) -> TableBatch:
    return TableBatch(schema=schema, rows=FOLDED_ARROW.empty_table(), frame=None, after=0, upto=1)


def _written_vector(number: int) -> NewVector:
    """Return what a task reports of the deletion vector that it wrote for a file."""
    _, content, (descriptor,) = encode([BitMap(range(number % 100, ROWS_OF_FILE, 100))])
    return NewVector(number, descriptor["cardinality"], descriptor, f"simulated-{number}.bin", len(content))


def _written_file(number: int) -> DataFile:
    """Return what a task reports of the file that it wrote."""
    first = number * ROWS_OF_FILE
    bounds = {
        name: {"id": first + rows, "_position": first + rows, "_ordinal": 0}
        for name, rows in (("minValues", 0), ("maxValues", ROWS_OF_FILE))
    }
    statistics = {"numRecords": ROWS_OF_FILE, **bounds, "nullCount": dict.fromkeys(bounds["minValues"], 0)}
    return DataFile(f"simulated-{number}.parquet", MOST_BYTES, ROWS_OF_FILE, json.dumps(statistics))
