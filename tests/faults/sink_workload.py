"""The life of a small pipeline in one process: a log that grows, two lakes, a search index and a delivery to files.

`python -m tests.faults.sink_workload FOLDER LAST` lives it in FOLDER/pipeline, up to the transaction LAST. Everything
that a loss of power may damage is below that folder; the catalog is next to it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

from cdc import metrics
from cdc.catalog import Catalog
from cdc.config import Definition, load_definition
from cdc.delivery.delivery_figures import DeliveryFigures
from cdc.delivery.delivery_loop import DeliveryLoop
from cdc.delivery.opened_delivery import opened_delivery
from cdc.log.reader import LogReader
from cdc.log.writer import LogWriter
from cdc.position import Position
from cdc.targets.dead_letter_rows import read_parked
from cdc.targets.lake_reader import Lake
from cdc.targets.search_index_reader import SearchIndex
from pipelines.range_folder import RangeFolder
from pipelines.runtime.cut_requests import CutRequests
from pipelines.runtime.sink_status_reporter import SinkFigures
from pipelines.sink_kinds import build_sink
from pipelines.sink_loop import SinkLoop
from tests.delivery.loop_run import drain
from tests.fixtures.catalog import put_catalog
from tests.log.rows import IDENTITY, LIMITS, info, row, table
from tests.pipelines.shop_pipeline import COPY, ITEMS, change, delta_rows, schemas

LAKES: Final = ("indexed", "rewritten")
EVERY: Final = {"indexed": 1, "rewritten": 10, "find": 10}
"""Sink → number of transactions of a batch."""
BASELESS: Final = {COPY + 11, COPY + 67}
"""Positions of partial images without a base row, which the lakes park."""


def prepare(folder: Path, copied: int) -> None:
    """Write the definition, and make the log with a first copy of so many rows."""
    root = folder / "pipeline"
    root.mkdir(parents=True)
    delta = "upkeep: {every: 50ms, vacuum_after: 0s, keep_commits: 50}, cuts: {retain: 1s}"
    rewritten = f"{root}/rewritten/{{schema}}/{{table}}', writer: copy-on-write"
    (folder / "shop.yaml").write_text(
        "name: shop\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/nowhere'}\ntables: [{match: 'shop.*'}]\n"
        f"log: {{path: '{root}/log'}}\ncatalog: {{url: 'sqlite:///{folder}/catalog.db'}}\n"
        "sinks:\n"
        f"- {{type: delta, name: indexed, path: '{root}/indexed/{{schema}}/{{table}}', {delta}}}\n"
        f"- {{type: delta, name: rewritten, path: '{rewritten}, {delta}}}\n"
        f"- {{type: search, name: find, path: '{root}/find/index', tables: [shop.items]}}\n"
        f"deliveries: [{{type: file, name: out, path: '{root}/out', rotate: 1MiB}}]\n"
    )
    put_catalog(folder)
    writer = LogWriter.open(root / "log", IDENTITY, LIMITS)
    append(writer, COPY, first_copy(copied))


def rows_at(position: int) -> list[dict[str, Any]]:
    """The rows of the transaction at a position."""
    if position in BASELESS:
        return [change(position, 0, 9_000, None, op="u", after=[(1, "9000")], partial=True)]
    number, key = position - COPY, position % 7
    rows = [
        change(position, 0, key, f"o{position}", op="u"),
        change(position, 1, number + 20, None, op="d", after=None),
        change(position, 2, key, f"i{position}", op="u", of=ITEMS),
    ]
    if number % 20 == 19:
        rows.append(change(position, 3, 9_000, "complete"))  # it releases the parked row
    if number % 20 == 1:
        rows.append(change(position, 3, 9_000, None, op="d", after=None))
    return rows


def first_copy(copied: int) -> list[dict[str, Any]]:
    """The rows of the first copy of both tables: `copied` orders, and ten items."""
    found = [
        row(COPY, n, op="s", relation=s.relation, topic=s.topic, key=None, after=None, payload=s.to_json())
        for n, s in enumerate(schemas())
    ]
    found += [change(COPY, 2 + n, n, f"o{n}", op="r") for n in range(copied)]
    found += [change(COPY, 2 + copied + n, n, f"i{n}", op="r", of=ITEMS) for n in range(10)]
    ends = enumerate(schemas(), 12 + copied)
    return [*found, *(
        row(COPY, n, op="g", relation=s.relation, topic=s.topic, key=None, after=None, payload=str(COPY).encode())
        for n, s in ends
    )]  # fmt: skip


def append(writer: LogWriter, position: int, rows: list[dict[str, Any]] | None = None) -> None:
    """Append the transaction at a position."""
    writer.commit(writer.stage(table(*(rows or rows_at(position)))), info(position))


def live(folder: Path, last: int) -> None:
    """Live from the first copy to the transaction `last`; half-way, all sinks are closed and opened again."""
    definition = load_definition(folder / "shop.yaml")
    writer = LogWriter.open(definition.log.path, IDENTITY, LIMITS)
    for end in ((COPY + last) // 2, last):
        with pipeline(definition) as (loops, delivery):
            for position in range((writer.durable or 0) + 1, end + 1):
                append(writer, position)
                for name, loop in loops.items():
                    if position % EVERY[name] == 0:
                        loop(None, Position(position))
                if position % 10 == 0:
                    drain(delivery)
            for loop in loops.values():
                loop(None, writer.durable or Position(0))
            drain(delivery)


def resume(folder: Path, last: int) -> None:
    """Continue a life that ended anywhere, to the same end: the log first, then each sink and the delivery."""
    definition = load_definition(folder / "shop.yaml")
    writer = LogWriter.open(definition.log.path, IDENTITY, LIMITS)
    for position in range((writer.durable or 0) + 1, last + 1):
        append(writer, position)
    with pipeline(definition) as (loops, delivery):
        for loop in loops.values():
            loop.catch_up_all(None)
            loop(None, Position(last))
        drain(delivery)


@contextmanager
def pipeline(definition: Definition) -> Iterator[tuple[dict[str, SinkLoop], DeliveryLoop]]:
    """The open loops of all sinks by name, and that of the delivery."""
    root, figures = Path(definition.log.path).parent, metrics.Metrics()
    with ExitStack() as stack:
        catalog = stack.enter_context(Catalog.open(definition.catalog.url))
        loops = {}
        for settings in definition.sinks:
            sink = build_sink(settings, str(root / "key-index" / settings.name))
            stack.callback(sink.close)
            fold = RangeFolder(LogReader(definition.log.path), settings.name, settings.tables)
            loops[settings.name] = SinkLoop(
                sink, fold, CutRequests(catalog, "shop"), SinkFigures("shop", settings.name, figures)
            )
            loops[settings.name].open()
        (out,) = definition.deliveries
        log = LogReader(definition.log.path)
        delivery = stack.enter_context(
            opened_delivery(definition, out, log, DeliveryFigures("shop", "out", figures))
        ).loop
        delivery.check_stored()
        yield loops, delivery


def contents(folder: Path) -> dict[str, Any]:
    """What every sink and the delivery have; the state of a table that stopped, in place of its rows."""
    root = folder / "pipeline"
    found: dict[str, Any] = {}
    for name in LAKES:
        path = f"{root}/{name}/{{schema}}/{{table}}"
        published = Lake.open(path).published()
        assert published is not None
        for record in published.tables.values():
            rows = delta_rows(record.target, record.version) if record.state == "streaming" else record.reason
            found[f"{name} {record.topic}"] = rows, record.parked
        found[f"{name} parked"] = sorted(parked.key for parked in read_parked(path, published))
    index = SearchIndex.open(root / "find/index")
    found["find"] = sorted((row.key, int(row.position), row.source) for row in index.documents("shop.items"))
    lines = [line for file in sorted((root / "out").glob("*.jsonl")) for line in file.read_text().splitlines()]
    found["out"] = [json.loads(line) for line in lines]
    return found


def main(folder: str, last: str) -> None:
    """A life, in a process of its own."""
    live(Path(folder), int(last))


if __name__ == "__main__":
    main(*sys.argv[1:])
