"""The field type of a Spark SQL expression over one row, with the checks that are possible without Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise, zip_longest
from typing import Annotated, Final

from pydantic import AfterValidator

from cdc.config.field_types import invalid

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")"""
    r"""|`(?P<quoted>(?:[^`]|``)+)`|(?P<word>[^\W\d]\w*)|(?P<number>\d\w*)|(?P<sign>.)""",
    re.DOTALL,
)
BARE: Final = frozenset(
    {
        "current_date",
        "current_time",
        "current_timestamp",
        "current_user",
        "localtimestamp",
        "session_user",
        "user",
    }
)
"""Names that Spark treats as a function call even without parentheses, unless a column has that name."""
CHANGING: Final = BARE | {
    "current_catalog",
    "current_database",
    "current_schema",
    "current_timezone",
    "input_file_block_length",
    "input_file_block_start",
    "input_file_name",
    "java_method",
    "monotonically_increasing_id",
    "now",
    "rand",
    "randn",
    "random",
    "randstr",
    "reflect",
    "shuffle",
    "spark_partition_id",
    "try_reflect",
    "uniform",
    "uuid",
    "version",
}
"""Functions of Spark that an expression must not call: they are not deterministic, or they call Java code by name."""
_TIMES: Final = frozenset({"date", "timestamp", "timestamp_ltz", "timestamp_ntz"})
"""Words before a text that make it a literal of a date or a time."""
_SPECIAL_TIME: Final = re.compile(r"\W*(?:now|today|tomorrow|yesterday)", re.IGNORECASE)
"""How such a text begins if it is another date or time every day."""
_CLOSES: Final = {")": "(", "]": "[", "}": "{"}


def named_in(expression: str) -> Iterator[tuple[int, str, bool]]:
    """Yield (offset, name, True if it is called as a function) for every identifier in an expression."""
    tokens = _tokens(expression)
    for token, following in zip_longest(tokens, tokens[1:]):
        name = token["word"] or (token["quoted"] or "").replace("``", "`")
        if name:
            yield token.start(), name, following is not None and following["sign"] == "(" and not token["quoted"]


def _tokens(expression: str) -> list[re.Match[str]]:
    return [token for token in _TOKEN.finditer(expression) if token["space"] is None]


def _paired(text: str) -> str:
    opened: list[tuple[str, int]] = []
    for token in _tokens(text):
        sign, place = token["sign"] or "", token.start() + 1
        if sign and sign in "'\"`;":
            raise invalid("character {place}: expected one expression with balanced quotes", place=place)
        if sign in _CLOSES.values():
            opened.append((sign, place))
        elif sign in _CLOSES and (not opened or opened.pop()[0] != _CLOSES[sign]):
            raise invalid("character {place}: closing bracket without an opening one", place=place)
    if opened:
        raise invalid("character {place}: bracket is never closed", place=opened[-1][1])
    return text


def _over_one_row(text: str) -> str:
    if not _tokens(text):
        raise invalid("expected an expression of Spark SQL")
    for start, name, called in named_in(text):
        if called and name.lower() in CHANGING:
            raise invalid("character {place}: the function is not deterministic", place=start + 1)
        if name.lower() == "select" or (called and name.lower() == "over"):
            message = (
                "character {place}: subqueries and window functions are not allowed: an expression "
                "computes from one row"
            )
            raise invalid(message, place=start + 1)
    for token, following in pairwise(_tokens(text)):
        literal = following["text"] or ""
        if (token["word"] or "").lower() in _TIMES and _SPECIAL_TIME.match(literal):
            raise invalid("character {place}: the date or time is another one every day", place=token.start() + 1)
    return text


Expression = Annotated[str, AfterValidator(_paired), AfterValidator(_over_one_row)]
"""A deterministic expression of Spark SQL over one row."""
