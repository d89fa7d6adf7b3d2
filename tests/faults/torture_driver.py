"""`python -m tests.faults.torture_driver SINK ROWS AFTER UPTO`: a driver that applies one range twice and publishes it.

SINK is the definition of a sink on a search server as JSON, ROWS a file with the pickled rows of a log. A failpoint
kills the driver somewhere on the way.
"""

from __future__ import annotations

import pickle
import sys
from contextlib import suppress
from pathlib import Path

from cdc.config import SearchSinkDefinition
from cdc.errors import SinkUnavailable
from cdc.targets.published_record import Published
from pipelines.sinks.search_server.sink import SearchServerSink
from tests.contracts.histories import batch
from tests.pipelines.fold_model import Row

LOG = "log-1"
FAILPOINTS = (
    "search_before_rows:1",
    "search_before_rows:2",
    "search_after_rows:1",
    "search_after_rows:2",
    "search_before_refresh:1",
    "search_before_commit:1",
    "search_after_commit:1",
)


def apply_range(sink: SearchServerSink, rows: list[Row], after: int, upto: int) -> None:
    """Apply a range twice, and publish it."""
    record = [sink.apply(batch(rows, after, upto, every=False)) for _ in range(2)][-1]
    sink.publish(Published(upto, 0, {record.relation: record}))


def main() -> None:
    """Apply the range; after an error of the server again, as the loop of the apply process does."""
    find, file, after, upto = sys.argv[1:]
    rows = pickle.loads(Path(file).read_bytes())
    while True:
        sink = SearchServerSink(SearchSinkDefinition.model_validate_json(find))
        with suppress(SinkUnavailable):
            sink.open(LOG)
            apply_range(sink, rows, int(after), int(upto))
            return


if __name__ == "__main__":
    main()
