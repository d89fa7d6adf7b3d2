"""Unread: a file of the log that one of Spark's workers could not read, as the error that it was over there."""

from __future__ import annotations

import re
from typing import Final

from cdc.errors import LogCorrupt

_TOLD: Final = re.compile(r"LogCorrupt: ([^\n]+)")


def unread_by_worker(exc: BaseException) -> LogCorrupt | None:
    """The error, where Spark hands on only its text; None if it was another one."""
    found = _TOLD.search(str(exc))
    return None if found is None else LogCorrupt(found[1])
