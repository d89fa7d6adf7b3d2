"""Query process: runs one query of the API, so that a query can be stopped and cannot harm the server.

`python -m cdc.service.query_process` reads a sink and a request from its standard input, pickled by the server. Its
last line of output is a JSON object with the answer, or with the error. The process cannot change a file, and it has a
limit of memory: the query engine ends the process when it cannot allocate.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import sys
from pathlib import Path
from typing import Final

from cdc.errors import CdcError, QueryStopped
from cdc.targets.read_only_guard import deny_file_writes
from cdc.targets.table_query import query_tables

MEMORY: Final = 2**30
"""Maximum number of bytes that a query may allocate."""
ANSWER: Final = 16 * 2**20
"""Maximum number of bytes of an answer."""


def _limit_memory() -> None:
    """Limit the memory of this process to what it has now and MEMORY bytes."""
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[5])
        limit = pages * os.sysconf("SC_PAGE_SIZE") + MEMORY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _answer() -> str:
    """Run the query, and return its answer as JSON."""
    sink, request = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the server that started this process
    _limit_memory()
    deny_file_writes()
    try:
        answer = json.dumps({"answer": query_tables(sink, request).to_json()})
    except MemoryError as error:
        raise QueryStopped(f"the query needs more than {MEMORY:,} bytes of memory") from error
    if len(answer) > ANSWER:
        raise QueryStopped(f"the answer of the query has {len(answer):,} bytes: expected at most {ANSWER:,}")
    return answer


def _main() -> None:
    try:
        line = _answer()
    except CdcError as error:
        line = json.dumps({"error": error.to_json()})
    print(f"\n{line}", flush=True)  # noqa: T201 - the output is the answer


if __name__ == "__main__":
    _main()
