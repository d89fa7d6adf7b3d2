"""Errors of Spark's Python workers, turned back into the exceptions that were raised there."""

from __future__ import annotations

import re
from typing import Final

from cdc.errors import LogCorrupt

_LOG_CORRUPT: Final = re.compile(r"LogCorrupt: ([^\n]+)")


def worker_error(exc: BaseException) -> LogCorrupt | None:
    """The LogCorrupt that a worker raised, of which Spark forwards only the text; None for any other error."""
    found = _LOG_CORRUPT.search(str(exc))
    return None if found is None else LogCorrupt(found[1])
