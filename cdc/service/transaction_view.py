"""One transaction of the log for the API, without row values: only the command line prints those."""

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
"""A source block without content: only Debezium's format prints one."""


def transaction(log: LogReader, text: str, most: int) -> Transaction:
    """The transaction at a position, with at most its first `most` rows.

    Raises MalformedPosition, and UnknownName if there is no such transaction or it is trimmed.
    """
    position = Position.parse(text)
    if position <= log.oldest:
        raise UnknownName(
            f"changes up to {log.oldest!s} are trimmed; only their compacted state is left",
            remedy="name a later position",
        )
    found, count = outline(log, position, most)
    if not count:
        raise UnknownName(f"no rows at position {text!r}", remedy="run 'cdc tail' for positions that have rows")
    rows: list[dict[str, Any]] = [row | _NOT_READ for row in found.to_pylist()]
    shown = messages(rows, SchemaInForce(log.schemas(position)), MessageFormat.CDC, _NOWHERE)
    return Transaction(position=str(position), rows=count, changes=[message for _, message in shown])
