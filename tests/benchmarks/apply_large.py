"""Large targets: what a batch of 1,000 random keys costs where the target has many rows; and one of the newest keys.

The writer is the default of a definition. A batch by copy-on-write is measured, too.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, write_deltalake

from cdc.config import DeltaSinkDefinition, SinkRule
from cdc.targets.lake_reader import read_target
from cdc.targets.published_record import Published, TableRecord
from pipelines.folding.fold import FOLDED_ARROW
from pipelines.sinks.contract import TableBatch
from pipelines.sinks.delta.delta_target import DeltaTarget
from pipelines.sinks.delta.maintenance import UpkeepSettings
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.benchmarks.apply_input import ITEMS
from tests.benchmarks.figures import Figure
from tests.fixtures.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCH = 1_000
BATCHES = 20
PEER_BATCHES = 5
NEWEST = 0.01
DEFAULT_WRITER: Final = Writer(DeltaSinkDefinition.model_fields["writer"].default)
"""The writer of a definition that names none."""
FILE = 1_000_000
"""Rows of one file of the target, which come in the order of their keys."""
TENTH = 10
"""The target that the large one is compared with is so many times smaller."""
FILLED: Final = 5
"""Position of the rows that are there before the first batch."""
_SIZES = ("5m", "50m")
"""In the names of figures, also where there are fewer rows."""
_KEYS = ("", ".newest")
"""End of a figure's key: random keys of the whole target, or of its newest hundredth."""
_VALUES = pa.schema([("id", pa.int64()), ("amount", pa.int64()), ("state", pa.string()), ("note", pa.string())])


def figures() -> dict[str, Figure]:
    """What is measured here."""
    return {
        "cost_ratio_50m_vs_5m": Figure("ratio", at_most=1.3),
        "cost_ratio_50m_vs_5m.newest": Figure("ratio"),
        "cost_ratio_50m_vs_5m.copy_on_write": Figure("ratio"),
        **{f"batch_seconds.target_{size}{keys}": Figure("s") for size in _SIZES for keys in (*_KEYS, ".copy_on_write")},
        "written_mib.target_50m": Figure("MiB"),
        "written_mib.target_50m.copy_on_write": Figure("MiB"),
        **{f"rows_differing.target_{size}": Figure("rows", at_most=0, in_every_run=True) for size in _SIZES},
    }


def measure(random: np.random.Generator, rows: int, noted: dict[str, Figure]) -> None:
    """Batches into a target of so many rows, and into one of a tenth."""
    costs: dict[str, Applied] = {}
    for size, count in zip(_SIZES, (rows // TENTH, rows), strict=True):
        with filled(count, Kind(DEFAULT_WRITER)) as target:
            target.apply(chosen(random, 0, count))
            target.finish_index()
            for keys, least in zip(_KEYS, (0, count - int(count * NEWEST)), strict=True):
                costs[f"{size}{keys}"] = median(target.apply(chosen(random, least, count)) for _ in range(BATCHES))
            noted[f"rows_differing.target_{size}"].values.append(target.differing())
            target.close()
        with filled(count, Kind(Writer.COPY_ON_WRITE)) as target:
            costs[f"{size}.copy_on_write"] = median(target.apply(chosen(random, 0, count)) for _ in range(PEER_BATCHES))
    for keys in (*_KEYS, ".copy_on_write"):
        for size in _SIZES:
            noted[f"batch_seconds.target_{size}{keys}"].values.append(costs[f"{size}{keys}"].seconds)
        noted[f"cost_ratio_50m_vs_5m{keys}"].values.append(costs[f"50m{keys}"].seconds / costs[f"5m{keys}"].seconds)
    noted["written_mib.target_50m"].values.append(costs["50m"].mib)
    noted["written_mib.target_50m.copy_on_write"].values.append(costs["50m.copy_on_write"].mib)


def chosen(random: np.random.Generator, least: int, rows: int, size: int = BATCH) -> np.ndarray:
    """The keys of one batch, from `least` on."""
    return np.sort(random.choice(rows - least, min(size, rows - least), replace=False) + least)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a target is kept, and in which order it was filled."""

    writer: Writer = Writer.COPY_ON_WRITE
    rules: tuple[SinkRule, ...] = ()
    spark: SparkSession | None = None
    bucket: Callable[[np.ndarray], np.ndarray] | None = None
    """By which the rule parts it; None: a file has the keys of a range."""
    upkeep: UpkeepSettings = field(default_factory=UpkeepSettings)
    bucket_uri: str | None = None
    """URI of the bucket with the target; None: the target is on the disk."""

    def files(self, rows: int) -> Iterator[np.ndarray]:
        """Keys that are written at once."""
        ids = np.arange(rows)
        if self.bucket is not None:
            ids = ids[np.argsort(self.bucket(ids), kind="stable")]
        yield from np.array_split(ids, max(1, rows // FILE))


@dataclass(frozen=True, slots=True)
class Applied:
    """What one batch cost."""

    seconds: float
    mib: float
    """Of data files that it wrote."""


def median(applied: Iterable[Applied]) -> Applied:
    """Of the seconds, and of the bytes, of some batches."""
    costs = list(applied)
    return Applied(float(np.median([one.seconds for one in costs])), float(np.median([one.mib for one in costs])))


class Target:
    """A sink with one large target, and what its rows have to be."""

    def __init__(self, sink: DeltaSink, uri: str, rows: int) -> None:
        self._sink, self.uri = sink, uri
        self._record: TableRecord | None = None
        self._positions = np.full(rows, FILLED, np.int32)
        """Of the last change of each key."""
        self._upto = FILLED

    def apply(self, keys: np.ndarray) -> Applied:
        """One batch that updates these keys."""
        before, after = self._upto, self._upto + FILLED
        had = self._files()
        batch = _batch(keys, before, after)
        began = time.perf_counter()
        self._record = self._sink.apply(batch)
        seconds = time.perf_counter() - began
        self._positions[keys], self._upto = after, after
        has = self._files()
        return Applied(seconds, sum(has[path] for path in has.keys() - had.keys()) / 2**20)

    def merge_with_delta_rs(self, keys: np.ndarray) -> Applied:
        """One batch that updates these keys by the MERGE of delta-rs, past the sink."""
        self._upto += FILLED
        rows = values(keys, np.full(len(keys), self._upto))
        rows = rows.append_column("_position", pa.array(np.full(len(keys), self._upto)))
        rows = rows.append_column("_ordinal", pa.array(np.arange(len(keys))))
        had = self._files()
        began = time.perf_counter()
        merger = DeltaTable(self.uri).merge(
            rows, "s.id = t.id", source_alias="s", target_alias="t", streamed_exec=False
        )
        merger.when_matched_update_all().when_not_matched_insert_all().execute()
        seconds = time.perf_counter() - began
        self._positions[keys] = self._upto
        has = self._files()
        return Applied(seconds, sum(has[path] for path in has.keys() - had.keys()) / 2**20)

    @property
    def nbytes(self) -> int:
        """Bytes of what the rows have to be."""
        return self._positions.nbytes

    @property
    def index_folder(self) -> Path:
        """Where the sink keeps its key indexes."""
        return index_folder(Path(self.uri).parent.parent)

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()

    def finish_index(self) -> None:
        """Wait until batches do not read the keys of data files any more."""
        until(lambda: self._sink.index_notice(self.uri) is None, "the key index")

    @property
    def is_being_rewritten(self) -> bool:
        """Whether maintenance rewrites files of the target."""
        return self._sink.parts.rewriter.is_busy()

    def publish(self) -> None:
        """Publish the last batch; maintenance follows."""
        assert self._record is not None
        self._sink.publish(Published(self._upto, self._upto, {self._record.relation: self._record}))

    def differing(self) -> int:
        """Rows that are missing, there twice, or not as the input says: every row is looked at."""
        rows, seen = 0, np.zeros(len(self._positions), bool)
        wrong = 0
        for batch in read_target(self.uri, None):
            found = pa.Table.from_batches([batch]).select(_VALUES.names).cast(_VALUES)
            ids = found["id"].to_numpy()
            wanted = values(ids, self._positions[ids])
            same = [pc.equal(found[name], wanted[name]) for name in _VALUES.names]
            alike = pc.fill_null(pc.and_(pc.and_(same[1], same[2]), same[3]), fill_value=False)
            rows, wrong = rows + len(ids), wrong + len(ids) - (pc.sum(alike).as_py() or 0)
            seen[ids] = True
        distinct = int(seen.sum())
        return wrong + (rows - distinct) + (len(seen) - distinct)

    def _files(self) -> dict[str, int]:
        files = pa.table(DeltaTable(self.uri).get_add_actions(flatten=True))
        return dict(zip(files["path"].to_pylist(), files["size_bytes"].to_pylist(), strict=True))


def index_folder(folder: Path) -> Path:
    """Return where a sink keeps its key indexes. folder: that of its targets."""
    return folder / "key-indexes"


@contextmanager
def filled(rows: int, kind: Kind) -> Iterator[Target]:
    """An open sink whose target holds so many rows, and stands at FILLED."""
    folder = Path(tempfile.mkdtemp(prefix="cdc-large-"))
    try:
        settings = DeltaSettings(
            "lake",
            f"{kind.bucket_uri or folder}/{{schema}}/{{table}}",
            kind.writer,
            rules=kind.rules,
            upkeep=kind.upkeep,
            index_folder=str(index_folder(folder)),
        )
        sink = DeltaSink(settings, kind.spark)
        sink.open("bench")
        target = DeltaTarget.open(sink.apply(_batch(np.arange(0), 0, FILLED)).target)
        assert target is not None
        _fill(target, kind.files(rows), kind)
        yield Target(sink, target.uri, rows)
    finally:
        shutil.rmtree(folder)


def values(ids: np.ndarray, positions: np.ndarray) -> pa.Table:
    """The rows of these keys, as the last change of each left them."""
    first = pa.array(positions == FILLED)
    made = pa.array(ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)).cast(pa.string())
    keys, at = pa.array(ids).cast(pa.string()), pa.array(positions).cast(pa.string())
    columns = [
        pa.array(ids),
        pc.if_else(first, pa.array(ids), pa.array(positions.astype(np.int64))),
        pc.if_else(first, made, pc.binary_join_element_wise("state", at, " ")),
        pc.if_else(first, made, pc.binary_join_element_wise("note", keys, " ")),
    ]
    return pa.table(columns, schema=_VALUES)


def _fill(target: DeltaTarget, files: Iterable[np.ndarray], kind: Kind) -> None:
    columns = target.columns
    for ids in files:
        rows = values(ids, np.full(len(ids), FILLED))
        rows = rows.append_column("_position", pa.array(np.full(len(ids), FILLED)))
        rows = rows.append_column("_ordinal", pa.array(ids))
        if kind.bucket is not None:
            rows = rows.append_column("bucket", pa.array(kind.bucket(ids)))
        write_deltalake(target.table, rows.select(columns.names).cast(columns), mode="append")


def _batch(keys: np.ndarray, after: int, upto: int) -> TableBatch:
    rows = [
        {
            "relation": ITEMS.relation,
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
    return TableBatch(schema=ITEMS, rows=images, frame=None, after=after, upto=upto)
