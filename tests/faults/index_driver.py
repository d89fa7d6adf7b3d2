"""`python -m tests.faults.index_driver URL INDEX STEP`: one step of a sink on a search server, as a driver takes it.

STEP: `copy` writes the first rows, `column` adds a column, `replay` builds a new index and publishes it.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from cdc.config import SearchSinkDefinition
from pipelines.sinks.contract import Published
from pipelines.sinks.search_server.staged_indexes import StagedSearchServer
from tests.contracts.folded import ORDERS, batch, column, put
from tests.pipelines.sinks.search_server.server_sink import LOG, merge, opened

STEPS = ("copy", "column", "replay")
NOTED = replace(ORDERS, columns=(*ORDERS.columns, column(4, "note")))


def drive(find: SearchSinkDefinition, step: str) -> None:
    """Take a step, which an earlier driver may have begun."""
    if step == "replay":
        _replay(find)
        return
    sink = opened(find)
    if step == "copy":
        merge(sink, batch([put(1, "a", 10), put(2, "b", 11)], 0, 20))
    else:
        row = put(1, "A", 30)
        noted = replace(row, after={**(row.after or {}), 4: "seen"})
        merge(sink, replace(batch([noted], 20, 40), schema=NOTED))
    sink.close()


def _replay(find: SearchSinkDefinition) -> None:
    staged = StagedSearchServer(find)
    staged.forget_earlier({ORDERS.relation: ORDERS})
    staged.sink.open(LOG)
    rows = [put(1, "rebuilt", 30), put(2, "b", 11)]
    record = staged.sink.apply(replace(batch(rows, 0, 50, generation=5), schema=NOTED))
    built = Published(50, 0, {record.relation: record})
    staged.sink.publish(built)
    staged.open_published(LOG)
    staged.put(built, {})


if __name__ == "__main__":
    url, index, step = sys.argv[1:]
    server = {"url": url, "index": index}
    drive(
        SearchSinkDefinition.model_validate(
            {"type": "search", "name": "find", "engine": "opensearch", "server": server}
        ),
        step,
    )
