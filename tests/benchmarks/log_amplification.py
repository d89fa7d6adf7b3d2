"""Write amplification: how often each byte of a log is written until it rests, over many compactions of a real log.

Commits of all sizes, keys of several tables that come, change as a whole or in part, and go; small files are settled
and segments are trimmed meanwhile, as in the reader's process, and what is left of deletes goes behind a consumer.
Nothing leaves the disk, so that what was ever written can be counted at the end.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.log.disk_format import CHANGES, COMPACTED
from cdc.log.reader import LogReader
from cdc.log.small_file_rewrite import SmallFileRewriter
from cdc.log.trim_plan import Retention, plan_trim
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from pipelines.compaction.compaction_steps import compact
from pipelines.folding.fold import fold
from tests.benchmarks.figures import Figure
from tests.log.rows import IDENTITY, info

TRANSACTION: Final = 10
"""Changes of one."""
RELATIONS: Final = 21
"""One large table, and twenty that share a tenth of the keys."""
CHECKED_EVERY: Final = 10
"""Compactions after which the log is held against what was done."""
_LARGE: Final = 16_384
_ABSENT: Final = -1
_WIDTH: Final = 4
"""Columns: the key, the change that set them, and two texts, of which the second is large and not always sent."""
_KEEP: Final = Retention(max_age=1e12, grace=1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large the log is made."""

    keys: int
    segment: int
    """Bytes."""
    commit: int
    """Changes of the largest; as many commits are of ten as of a hundred or of a thousand."""
    many: int
    """New files of the open segment that are gathered: fewer than in a real one, which is larger as well."""
    compactions: int = 50
    grows: bool = False
    """Whether every change brings a key that was never there, so that nothing is ever replaced."""


LARGE: Final = Size(keys=500_000, segment=4 << 20, commit=20_000, many=24)
SMALL: Final = Size(keys=20_000, segment=100_000, commit=300, many=9)


class Source:
    """The rows of several tables, changed at random: what is said of it, and what it holds."""

    def __init__(self, size: Size, random: np.random.Generator) -> None:
        self._size, self._random = size, random
        self._changes = 0
        self._set_by = np.full(size.keys, _ABSENT)
        self._large_by = np.full(size.keys, _ABSENT)

    def commit(self, count: int) -> pa.Table:
        """About so many changes, as the log holds them: no two of one key."""
        random = self._random
        ids = self._changes + np.arange(count) if self._size.grows else self._chosen(count)
        numbers = self._changes + np.arange(len(ids))
        there, what = self._set_by[ids] != _ABSENT, random.random(len(ids))
        gone, partial = there & (what < 0.25), there & (what > 0.8)
        self._changes += len(ids)
        self._set_by[ids] = np.where(gone, _ABSENT, numbers)
        self._large_by[ids] = np.where(gone, _ABSENT, np.where(partial, self._large_by[ids], numbers))
        return _rows(numbers, ids, there, gone, partial)

    def _chosen(self, count: int) -> np.ndarray:
        """Keys in no order: half of what happens, happens to one in twenty."""
        among = np.where(self._random.random(count) < 0.5, max(1, self._size.keys // 20), self._size.keys)
        return self._random.permutation(np.unique(self._random.integers(0, among)))

    def held(self) -> pa.Table:
        """Its rows now, by key."""
        ids = np.flatnonzero(self._set_by != _ABSENT)
        return pa.table({"id": ids, "set_by": self._set_by[ids], "large": _large(self._large_by[ids])})


class Log:
    """A log on disk that is written, settled, compacted and trimmed."""

    def __init__(self, root: Path, size: Size, seed: int) -> None:
        self._root, self._size = root, size
        self._random = np.random.default_rng(seed)
        self._source = Source(size, self._random)
        self._writer = LogWriter.open(root, IDENTITY, SegmentLimits(size=size.segment, age=1e9))
        self._settling = SmallFileRewriter(root, lambda: False, size.many)
        self._first = 0
        """Bytes of the files that commits brought."""
        self._segment = 0
        """That is open."""

    def live(self) -> None:
        """Go on until it was compacted as often as asked for; raises RuntimeError if it is not what it should be."""
        for number in range(1, self._size.compactions + 1):
            due = self._segment + self._random.integers(1, 3)
            while self._segment < due:
                self._append()
            self._compact()
            if number % CHECKED_EVERY == 0:
                self._check(number)

    @property
    def amplification(self) -> float:
        """Bytes of all data files of both tables ever written / those of the commits alone."""
        tables = (self._root / CHANGES, self._root / COMPACTED)
        return sum(file.stat().st_size for table in tables for file in table.glob("segment=*/*.parquet")) / self._first

    def _append(self) -> None:
        """Some commits."""
        for count in np.exp(self._random.uniform(np.log(TRANSACTION), np.log(self._size.commit), 4)):
            rows = self._source.commit(int(count))
            staged = self._writer.stage(rows)
            self._writer.commit(staged, info(rows["position"][-1].as_py()))
            self._first += sum(file.size for file in staged)
            self._segment = staged[-1].segment
        if self._settling.prepare():
            self._settling.commit_prepared(self._writer)

    def _compact(self) -> None:
        """What is closed, now and then all there is; and what every reader has passed is trimmed."""
        made = compact(None, self._root, everything=self._random.random() < 0.1)
        if not made.rows_in:
            raise RuntimeError(f"nothing was cold: {made.summary}")
        if self._random.random() < 0.5:
            consumers.register(self._root, Consumer("lake", "lake", made.horizon))
        if (trim := plan_trim(self._root, _KEEP)) is not None:
            self._writer.trim(trim.segments, trim.upto)

    def _check(self, number: int) -> None:
        log = LogReader(self._root)
        rows = pa.Table.from_batches(log.rows(Position(0), log.durable or Position(0)), LOG_SCHEMA)
        folded = fold(rows, sink="lake")
        latest = folded.filter(pc.equal(folded["op"], "u"))
        texts = [pc.map_lookup(latest["after"], pa.scalar(n, pa.int32()), "first") for n in (1, 2, _WIDTH)]
        found = pa.table({"id": texts[0].cast(pa.int64()), "set_by": texts[1].cast(pa.int64()), "large": texts[2]})
        if not found.sort_by("id").equals(self._source.held()):
            raise RuntimeError(f"after {number} compactions the log does not hold the last value of every key")


def measure(runs: int, figures: dict[str, Figure], *, quick: bool) -> None:
    """Add the values of so many runs."""
    size = SMALL if quick else LARGE
    for name, own in {"write_amplification": size, "write_amplification.growing": grown(size)}.items():
        for seed in range(runs):
            folder = Path(tempfile.mkdtemp(prefix="cdc-log-"))
            try:
                log = Log(folder, own, seed)
                log.live()
                figures[name].values.append(log.amplification)
            finally:
                shutil.rmtree(folder)


def grown(size: Size) -> Size:
    """The same for a log in which nothing is ever replaced."""
    return replace(size, grows=True, keys=20 * size.keys)


def figures() -> dict[str, Figure]:
    """What is measured, without values."""
    return {name: Figure("ratio", at_most=5) for name in ("write_amplification", "write_amplification.growing")}


def _rows(numbers: np.ndarray, ids: np.ndarray, there: np.ndarray, gone: np.ndarray, partial: np.ndarray) -> pa.Table:
    count, place = len(ids), numbers - numbers[0]
    keys = pa.array(ids).cast(pa.string())
    table = np.where(ids % 10 == 0, 1 + ids // 10 % (RELATIONS - 1), 0)
    names = pa.array([f"shop.table{n}" for n in range(RELATIONS)])
    position = 1_000 + numbers[0] + place // TRANSACTION
    said = {
        "position": position,
        "ordinal": place % TRANSACTION,
        "xid": position,
        "committed_at": pa.array(1_700_000_000_000_000 + position * 1_000).cast(pa.timestamp("us", "UTC")),
        "relation": _LARGE + table,
        "topic": names.take(pa.array(table)),
        "op": np.where(gone, "d", np.where(there, "u", "c")),
        "key": pa.ListArray.from_arrays(pa.array(np.arange(count + 1), pa.int32()), keys),
        "before": _maps(numbers, ids, np.where(gone, 1, 0)),
        "after": _maps(numbers, ids, np.where(gone, 0, np.where(partial, _WIDTH - 1, _WIDTH))),
        "partial": partial,
    }
    columns = [said.get(field.name, pa.nulls(count, field.type)) for field in LOG_SCHEMA]
    return pa.table(columns, names=LOG_SCHEMA.names).cast(LOG_SCHEMA)


def _maps(numbers: np.ndarray, ids: np.ndarray, widths: np.ndarray) -> pa.MapArray:
    """Images of so many columns each; null where there are none."""
    columns = (pa.array(ids), pa.array(numbers), pa.array(_noise(numbers)), _large(numbers))
    texts = np.stack([column.cast(pa.string()).to_numpy(zero_copy_only=False) for column in columns], axis=1)
    sent = np.arange(_WIDTH) < widths[:, None]
    offsets = np.concatenate(([0], np.cumsum(widths))).astype(np.int32)
    absent = np.concatenate((widths == 0, [False]))
    names = np.broadcast_to(np.arange(1, _WIDTH + 1, dtype=np.int32), sent.shape)[sent]
    return pa.MapArray.from_arrays(pa.array(offsets, mask=absent), pa.array(names), pa.array(texts[sent], pa.string()))


def _large(numbers: np.ndarray) -> pa.Array:
    """Texts that no codec makes much smaller."""
    parts = (pa.array(_noise(numbers) >> np.uint64(shift)).cast(pa.string()) for shift in (1, 7, 11))
    return pc.binary_join_element_wise(*parts, "-")


def _noise(numbers: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return mixed
