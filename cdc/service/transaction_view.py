"""Inspected: one transaction of the log for who asks over the API; what rows hold is for the command line alone."""

from __future__ import annotations

from typing import Any, Final

from cdc.errors import UnknownName
from cdc.log.inspect import outline
from cdc.log.message_formats import MessageFormat, SchemaInForce, SourceBlock, messages
from cdc.log.reader import LogReader
from cdc.position import Position
from cdc.service.log_status import Transaction

_NOT_READ: Final = {"before": None, "after": None, "partial": False}
_NOWHERE: Final = SourceBlock("", "", "")
"""Only Debezium's format says where a row is from."""


def transaction(log: LogReader, text: str, most: int) -> Transaction:
    """The one at a position, with its first rows, so many at most.

    Raises MalformedPosition, and UnknownName if there is none, or none any more.
    """
    position = Position.parse(text)
    if position <= log.oldest:
        raise UnknownName(
            f"the log holds no single changes up to {log.oldest!s}, only what they come to",
            remedy="ask for a position behind that one",
        )
    found, count = outline(log, position, most)
    if not count:
        raise UnknownName(f"no rows at position {text!r}", remedy="'cdc tail' prints positions that have rows")
    rows: list[dict[str, Any]] = [row | _NOT_READ for row in found.to_pylist()]
    told = messages(rows, SchemaInForce(log.schemas(position)), MessageFormat.CDC, _NOWHERE)
    return Transaction(position=str(position), rows=count, changes=[message for _, message in told])
