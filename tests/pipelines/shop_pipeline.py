"""A pipeline without a source: a log with a history of two tables, a definition with two sinks, and their rows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import pyarrow as pa

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, load_definition
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter, SegmentLimits
from cdc.log_row import LOG_SCHEMA
from cdc.position import Position
from cdc.table import TableSchema
from cdc.targets.lake_reader import Lake, read_target
from cdc.targets.search_index_reader import SearchIndex
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info, row, schema_of, table

ORDERS, ITEMS = 16384, 16385
COPY, END = 1_000, 1_400
"""Positions of the first copy and of the last transaction."""
Rows = dict[str, list[dict[str, Any]]]


def schemas() -> tuple[TableSchema, TableSchema]:
    """shop.orders and shop.items, each with an integer key and a note."""
    return schema_of(ORDERS, "note"), replace(schema_of(ITEMS, "note"), name="items")


def change(position: int, ordinal: int, key: int, note: str | None, **fields: Any) -> dict[str, Any]:
    """One row of shop.orders, or with of=ITEMS of shop.items."""
    of = fields.pop("of", ORDERS)
    topic = "shop.orders" if of == ORDERS else "shop.items"
    image = fields.pop("after", [(1, str(key)), (2, note)])
    return row(position, ordinal, relation=of, topic=topic, key=[str(key)], after=image, **fields)


def history() -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """(position, rows) of every transaction."""
    first = [row(COPY, n, op="s", relation=s.relation, topic=s.topic, key=None, after=None, payload=s.to_json())
             for n, s in enumerate(schemas())]  # fmt: skip
    first += [change(COPY, 2 + n, n, f"o{n}", op="r") for n in range(50)]
    first += [change(COPY, 52 + n, n, f"i{n}", op="r", of=ITEMS) for n in range(20)]
    ends = [row(COPY, 72 + n, op="g", relation=s.relation, topic=s.topic, key=None, after=None,
                payload=str(COPY).encode()) for n, s in enumerate(schemas())]  # fmt: skip
    yield COPY, [*first, *ends]
    yield 1_100, [change(1_100, 0, 1, "new", op="u"), change(1_100, 1, 2, None, op="d", after=None)]
    yield (
        1_200,
        [  # a partial image, a moved key with one, and a row that comes back
            change(1_200, 0, 3, None, op="u", after=[(1, "3")], partial=True),
            change(1_200, 1, 4, None, op="d", after=None),
            change(1_200, 2, 104, None, op="u", after=[(1, "104")], partial=True, old_key=["4"]),
            change(1_200, 3, 2, "back"),
        ],
    )
    cleared = row(1_300, 0, op="t", relation=ITEMS, topic="shop.items", key=None, after=None)
    yield 1_300, [cleared, change(1_300, 1, 7, "after", of=ITEMS), change(1_300, 2, 8, "too", of=ITEMS)]
    yield END, [change(END, 0, 1, "newest", op="u"), change(END, 1, 7, "later", op="u", of=ITEMS)]


@dataclass
class ShopPipeline:
    """One pipeline without a source; `lake` and `find` are its sinks."""

    folder: Path
    definition: Definition
    open_writer: Callable[[], LogWriter]
    """Always the same one: most tests only read the log, and to open a writer takes longer than to copy the log."""

    @property
    def writer(self) -> LogWriter:
        return self.open_writer()

    def append(self, position: int, rows: list[dict[str, Any]] | pa.Table) -> None:
        """Add a transaction to the log."""
        made = rows if isinstance(rows, pa.Table) else table(*rows)
        self.writer.commit(self.writer.stage(made), info(position))

    def drive(self, sink: str, upto: int = END) -> None:
        """Apply the log to a sink up to a position: its first transaction, then the others in one batch.

        Tables that lag are caught up first.
        """
        log = LogReader(self.definition.log.path)
        with self.opened(sink) as loop:
            loop.catch_up_all(None)
            ends = sorted({file.last for file in log.files(Position(0), Position(upto))})
            for end in [*ends[:1], *ends[1:][-1:]]:
                loop(None, end)

    @contextmanager
    def opened(self, sink: str) -> Iterator[SinkLoop]:
        """Open the loop of a sink."""
        wanted = next(s for s in self.definition.sinks if s.name == sink)
        log = LogReader(self.definition.log.path)
        with Catalog.open(self.definition.catalog.url) as catalog:
            target = build_sink(wanted)
            loop = SinkLoop(
                target,
                RangeFolder(log, sink, wanted.tables),
                CutRequests(catalog, "shop"),
                SinkFigures("shop", sink, FIGURES),
            )
            loop.open()
            yield loop
            loop.drain()
            target.close()

    def lake(self) -> Rows:
        """The rows of the Delta sink at its published cut, by table."""
        return {record.topic: delta_rows(record.target, record.version) for record in self.lake_of().tables()}

    def lake_of(self) -> Lake:
        """The Delta sink, for reading."""
        return Lake.open(f"{self.folder}/lake/{{schema}}/{{table}}")

    def found(self, path: str = "find") -> Rows:
        """The documents of the search index, by table."""
        index = SearchIndex.open(self.folder / path)
        rows = {topic: [{**r.source, "_position": int(r.position)} for r in index.documents(topic)]
                for topic in index.topics}  # fmt: skip
        return {topic: sorted(found, key=lambda r: int(r["id"] or 0)) for topic, found in rows.items()}


FIGURES = metrics.Metrics()


def repeated(row: dict[str, Any], count: int) -> pa.Table:
    """So many rows that differ in their ordinals alone: to make one after the other takes a second per 50,000."""
    rows = table(row).take(pa.array([0] * count))
    ordinal = LOG_SCHEMA.get_field_index("ordinal")
    return rows.set_column(ordinal, LOG_SCHEMA.field(ordinal), pa.array(range(count), LOG_SCHEMA.field(ordinal).type))


def delta_rows(target: str, version: int | None = None) -> list[dict[str, Any]]:
    """A Delta table's rows by key."""
    return sorted(pa.table(read_target(target, version)).to_pylist(), key=lambda row: row["id"])


@cache
def whole_log(limits: SegmentLimits) -> tuple[TemporaryDirectory[str], str]:
    """(folder of a log with the whole history, its id); to write it takes longer than to copy it."""
    folder = TemporaryDirectory()
    writer = LogWriter.open(folder.name, IDENTITY, limits)
    for position, rows in history():
        writer.commit(writer.stage(table(*rows)), info(position))
    return folder, writer.log_id


def copy_log(place: Path, limits: SegmentLimits) -> None:
    """Put a log with the whole history there, which has an id of its own."""
    folder, log_id = whole_log(limits)
    shutil.copytree(folder.name, place)
    own = str(uuid4())
    for commit in place.glob("changes/_delta_log/*.json"):
        commit.write_text(commit.read_text().replace(log_id, own))


def make_shop(folder: Path, limits: SegmentLimits = LIMITS) -> ShopPipeline:
    """The pipeline with its whole history in the log, and nothing applied."""
    folder.mkdir(exist_ok=True)
    (folder / "shop.yaml").write_text(
        f"name: shop\nsource: {{dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}}\ntables: [{{match: 'shop.*'}}]\n"
        f"log: {{path: '{folder}/log'}}\n"
        "spark: {trigger: 0s}\n"  # each step of a runner applies what there is
        "sinks:\n"
        f"- {{type: delta, name: lake, path: '{folder}/lake/{{schema}}/{{table}}'}}\n"
        f"- {{type: search, name: find, path: '{folder}/find'}}\n"
    )
    put_catalog(folder)
    copy_log(folder / "log", limits)
    return _shop_in(folder, limits)


def _shop_in(folder: Path, limits: SegmentLimits) -> ShopPipeline:
    return ShopPipeline(
        folder, load_definition(folder / "shop.yaml"), cache(partial(LogWriter, folder / "log", limits))
    )


class KeptShop:
    """A pipeline with applied sinks that is made once in a process; every test gets it as it was made.

    It is always put in the same folder: what a sink publishes has the paths of its targets.
    """

    def __init__(self, make: Callable[[ShopPipeline], object], limits: SegmentLimits = LIMITS) -> None:
        self._limits = limits
        self._home = TemporaryDirectory()
        self._folder, self._kept = Path(self._home.name, "shop"), Path(self._home.name, "kept")
        make(make_shop(self._folder, limits))
        self._folder.rename(self._kept)

    def put(self) -> ShopPipeline:
        """Replace what is in the folder by a copy of what was made."""
        if self._folder.exists():
            shutil.rmtree(self._folder)
        shutil.copytree(self._kept, self._folder)
        return _shop_in(self._folder, self._limits)


@cache
def _applied(sink: str, upto: int, limits: SegmentLimits) -> KeptShop:
    return KeptShop(lambda shop: shop.drive(sink, upto), limits)


def applied_shop(sink: str = "lake", upto: int = END, limits: SegmentLimits = LIMITS) -> ShopPipeline:
    """The pipeline with a sink that has the log up to there; another call puts it back as it was made."""
    return _applied(sink, upto, limits).put()
