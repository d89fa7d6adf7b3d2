"""Large targets: what a batch of 1,000 keys costs where the target has many rows: of any keys, or of the newest."""

from __future__ import annotations

import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from cdc.table import TableSchema
from pipelines.fold import FOLDED_ARROW
from pipelines.sinks.delta import DeltaSettings, DeltaSink, Writer
from pipelines.sinks.delta_table import DeltaTarget
from pipelines.sinks.sink import TableBatch
from tests.benchmarks.apply_input import ITEMS
from tests.benchmarks.figures import Figure

BATCH, BATCHES = 1_000, 5
NEWEST = 0.01
FILE = 1_000_000
"""Rows of one file of the target, which come in the order of their keys."""
TENTH = 10
"""The target that the large one is compared with is so many times smaller."""
_WHERE = ("newest", "random")
_SIZES = ("tenth", "whole")


def figures() -> dict[str, Figure]:
    """What is measured here."""
    return {
        "large.newest_ratio": Figure("ratio", at_most=2),
        "large.random_ratio": Figure("ratio"),
        **{f"large.{where}_seconds.{size}": Figure("s") for where in _WHERE for size in _SIZES},
    }


def measure(random: np.random.Generator, rows: int, noted: dict[str, Figure]) -> None:
    """Batches into a target of so many rows, and into one of a tenth."""
    found: dict[tuple[str, str], float] = {}
    for size, count in zip(_SIZES, (rows // TENTH, rows), strict=True):
        folder = Path(tempfile.mkdtemp(prefix="cdc-large-"))
        try:
            sink = _filled(folder, count)
            position = 10
            for where in _WHERE:
                least = count - int(count * NEWEST) if where == "newest" else 0
                took = []
                for _ in range(BATCHES):
                    keys = random.choice(count - least, min(BATCH, count - least), replace=False) + least
                    took.append(_applied(sink, keys, position))
                    position += 10
                found[where, size] = float(np.median(took))
                noted[f"large.{where}_seconds.{size}"].values.append(found[where, size])
        finally:
            shutil.rmtree(folder)
    for where in _WHERE:
        noted[f"large.{where}_ratio"].values.append(found[where, "whole"] / found[where, "tenth"])


def _filled(folder: Path, rows: int) -> DeltaSink:
    """An open sink whose target holds so many rows, and stands at position 5."""
    sink = DeltaSink(DeltaSettings("lake", f"{folder}/{{schema}}/{{table}}", Writer.DELTA_RS))
    sink.open("bench")
    record = sink.apply(_batch(ITEMS, np.arange(0), 0, 5))
    target = DeltaTarget.open(record.target)
    assert target is not None
    columns = target.columns
    for start in range(0, rows, FILE):
        ids = np.arange(start, min(start + FILE, rows))
        texts = pa.array(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).cast(pa.string())
        made = {"id": ids, "amount": ids, "state": texts, "note": texts}
        places = {"_position": np.full(len(ids), 5), "_ordinal": ids}
        write_deltalake(target.table, pa.table({**made, **places}).cast(columns), mode="append")
    return sink


def _applied(sink: DeltaSink, keys: np.ndarray, position: int) -> float:
    batch = _batch(ITEMS, np.sort(keys), position - 5, position)
    began = time.perf_counter()
    sink.apply(batch)
    return time.perf_counter() - began


def _batch(schema: TableSchema, keys: np.ndarray, after: int, upto: int) -> TableBatch:
    rows = [
        {
            "relation": schema.relation,
            "op": "u",
            "key": [str(key)],
            "position": upto,
            "ordinal": place,
            "committed_at": 0,
            "after": [(1, str(key)), (2, str(upto)), (3, f"state {upto}"), (4, f"note {key}")],
            "complete": True,
        }
        for place, key in enumerate(keys.tolist())
    ]
    images = pa.Table.from_pylist(rows, FOLDED_ARROW)
    return TableBatch(schema=schema, rows=images, frame=None, after=after, upto=upto)
