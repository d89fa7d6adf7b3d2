"""Random histories of several tables, keyed and keyless, as the rows of one log, and as a log on disk in segments."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby, pairwise
from random import Random

import pyarrow as pa

from cdc.bucket_files import Root
from cdc.log.writer import LogWriter, SegmentLimits
from pipelines.folding.fold import fold
from tests.log.rows import IDENTITY, info, schema_of
from tests.pipelines.fold_model import OTHER_SINK, SINK, Row, Source, log_row, message_row, to_arrow

EACH_OF_ITS_OWN = SegmentLimits(size=1, age=3600.0)
"""Every file that is written closes its segment."""
SPREAD = 100
"""Positions of a log for one position of a history: every table has its own of them."""


def folded(*parts: pa.Table, sink: str = SINK) -> list[Row]:
    """The fold, without the truncates and generations that a later one hides."""
    rows = fold(pa.concat_tables(parts), sink=sink).to_pylist(maps_as_pydicts="strict")
    rows.sort(key=lambda row: (row["relation"], row["position"], row["ordinal"]))
    last = {(row["relation"], row["op"]): row["position"] for row in rows if row["op"] in "tg"}
    return [row for row in rows if row["op"] not in "tg" or last[row["relation"], row["op"]] == row["position"]]


def history(relation: int, random: Random, *, addressed: bool = False) -> Source:
    """A random history, a part of it keyless; rows that are for one sink are true for the others as well."""
    source = Source(relation, random)
    for _ in range(random.randint(2, 16)):
        source.transaction()
    source.log = [row for row in source.log if row["address"] != OTHER_SINK]
    if not addressed:
        source.log = [row | {"address": None} for row in source.log]
    source.log.insert(0, log_row(relation, (9, 0), "s", payload=b"{}"))
    source.log.insert(1, message_row((9, 1)))
    if random.random() < 0.2:
        source.log = [_keyless(row) for row in source.log if not row["partial"]]
    return source


def _keyless(row: Row) -> Row:
    return row | {"key": None, "old_key": None}


def cut(rows: list[Row], random: Random, pieces: int) -> list[pa.Table]:
    """The rows in pieces, cut between positions, each in no order."""
    positions = [0, *sorted(random.randint(8, 30) for _ in range(pieces - 1)), 10**6]
    groups = [[row for row in rows if low < row["position"] <= high] for low, high in pairwise(positions)]
    return [to_arrow(random.sample(group, len(group))) for group in groups]


def histories(seed: int, number: int) -> list[Source]:
    return [history(n, Random(f"{seed} {n}")) for n in range(number)]


def interleaved(sources: list[Source]) -> list[Row]:
    """The histories as those of one log: no two of them have a position in common."""
    rows = []
    for number, source in enumerate(sources):
        schema = replace(schema_of(source.relation, "plain", "large", "more"), name=f"table{number}").to_json()
        for row in source.log:
            said = {"position": row["position"] * SPREAD + number}
            if row["op"] == "g":
                said["payload"] = str(int(row["payload"]) * SPREAD).encode()
            rows.append(row | said | ({"payload": schema} if row["op"] == "s" else {}))
    return sorted(rows, key=lambda row: (row["position"], row["ordinal"]))


def transactions(rows: list[Row]) -> list[list[Row]]:
    return [list(own) for _, own in groupby(rows, key=lambda row: row["position"])]


def log_writer(root: Root, limits: SegmentLimits = EACH_OF_ITS_OWN) -> LogWriter:
    return LogWriter.open(root, IDENTITY, limits)


def append(writer: LogWriter, several: list[list[Row]]) -> None:
    """Whole transactions in one commit."""
    rows = [row for own in several for row in own]
    writer.commit(writer.stage(to_arrow(rows)), info(rows[-1]["position"]))
