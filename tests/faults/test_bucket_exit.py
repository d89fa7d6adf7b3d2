"""A process that has written to a bucket, and read from it, in threads ends as it should."""

from __future__ import annotations

import pytest

from tests.fixtures import forked
from tests.fixtures.s3 import KEY_ID, S3, VARIABLES

WORK = """
import os, sys
from threading import Thread
from cdc.config.object_store import Storage, log_root
from cdc.log import table_io
from cdc.log.writer import LogWriter
from cdc.log.reader import LogReader
from cdc.position import Position
from tests.log.rows import IDENTITY, LIMITS, info, row, table

table_io.WHOLE_FETCH_BYTES = int(sys.argv[3])
root = log_root(sys.argv[1], Storage.from_json(sys.argv[2]))
seen = []

def append():
    writer = LogWriter.open(root, IDENTITY, LIMITS)
    for position in range(1, 6):
        writer.commit(writer.stage(table(*(row(position, n) for n in range(500)))), info(position))

def read():
    log = LogReader(root)
    seen.append(sum(batch.num_rows for batch in log.rows(Position(0), log.durable)))

for work in (append, read, read):
    thread = Thread(target=work)
    thread.start()
    thread.join()
print(seen)
"""


@pytest.mark.parametrize("run", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 12))])
def test_a_process_whose_threads_used_a_bucket_exits_with_0(s3: S3, run: int) -> None:
    whole = "0" if run % 2 == 0 else str(1 << 20)  # by ranges, or each file at once
    said = (
        f'{{"endpoint": "http://127.0.0.1:{s3.port}", "allow_http": true, "region": "us-east-1", '
        f'"access_key_id": "{KEY_ID}", "secret_access_key": {{"env": "{next(iter(VARIABLES))}"}}}}'
    )
    done = forked.run(
        "tests.run_code", WORK, s3.root(), said, whole, environment=VARIABLES, timeout=120, finalized=True
    )

    assert (done.status, done.output.strip()) == (0, "[2500, 2500]"), done.errors
