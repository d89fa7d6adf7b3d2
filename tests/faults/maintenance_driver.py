"""`python -m tests.faults.maintenance_driver FOLDER ROUNDS WRITER [COLUMN]…`: a Delta sink with merges and maintenance.

It continues from its published record, as a driver does. Row n is at position 10 n. Cuts are kept until the next
maintenance of the record, and files that no cut needs are removed at the maintenance after it. Each row is changed
once, so files get deleted rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from cdc.config import SinkRule
from cdc.targets.published_record import Published
from pipelines.sinks.delta.maintenance import TargetMaintenance, UpkeepSettings, ZOrdering
from pipelines.sinks.delta.settings import DeltaSettings, Writer
from pipelines.sinks.delta.sink import DeltaSink
from tests.contracts.folded import ORDERS, batch, put
from tests.pipelines.sinks.maintained_sink import Clock

LOG = "log-1"
EVERY = 20
"""Rounds between two looks at what to remove; a round takes a second of the clock, and nothing else does."""


def path_in(folder: object) -> str:
    """Of the sink."""
    return f"{folder}/{{schema}}/{{table}}"


def live(folder: str, rounds: int, *by: str, writer: Writer = Writer.AUTO) -> Iterator[int]:
    """Merge and publish so many rows more, kept in order by columns; yields the number of each that is published."""
    clock, ordering = Clock(), ZOrdering(least=0)
    settings = UpkeepSettings(every=EVERY, vacuum_after=0.0, retain=0.0, keep_commits=10, ordering=ordering)
    rules = (SinkRule(match="*.*", cluster_by=by),)
    sink = DeltaSink(DeltaSettings("lake", path_in(folder), writer, rules=rules, upkeep=settings))
    # due times do not depend on the machine
    sink._maintenance = TargetMaintenance(settings, clock, sink.parts.rewriter)
    published = sink.open(LOG)
    done = published.position // 10 if published else 0
    for number in range(done + 1, done + 1 + rounds):
        upto = number * 10
        clock.now += 1
        begun = 1 if number == 1 else None
        rows = [put(number, str(number), upto)]
        if number % 2 == 0:
            rows.append(put(number // 2, "changed", upto, ordinal=1))
        record = sink.apply(batch(rows, upto - 10, upto, generation=begun))
        sink.publish(Published(upto, upto, {ORDERS.relation: record}))
        yield number
    sink.close()


if __name__ == "__main__":
    for _ in live(sys.argv[1], int(sys.argv[2]), *sys.argv[4:], writer=Writer(sys.argv[3])):
        pass
