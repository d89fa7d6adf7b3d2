"""`cdc search`: find rows of a table by their words, in the index of a search sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, WaitOption, parse_seconds
from cdc.command_output import echo, emit, escaped_for_terminal

if TYPE_CHECKING:
    from cdc.targets.search_index_reader import FoundRow

_CELL = 60
"""Maximum number of characters per value in a line on the terminal; `--json` prints values in full."""

TableArgument = Annotated[
    str,
    typer.Argument(help="Search this table; write schema.table, or only the table's name if one schema has it."),
]
WordsArgument = Annotated[
    str, typer.Argument(help="Find rows with all these words; column:word searches only one column.")
]
SearchLimitOption = Annotated[int, typer.Option("--limit", min=1, max=10_000, help="Print at most this many rows.")]
AfterOption = Annotated[
    str | None,
    typer.Option(
        "--after",
        metavar="TOKEN",
        help="Print the page after this one: a token from `next` of --json. It is valid until the table's position "
        "changes.",
    ),
]
SearchSinkOption = Annotated[
    str | None,
    typer.Option("--sink", help="Search in this search sink [default: the first search sink that has the table]."),
]
MinPositionOption = Annotated[
    str | None,
    typer.Option(
        "--min-position",
        metavar="POSITION",
        help="Wait until the table has every change up to this position; write it as 16/B374D848 or 2:16/B374D848. "
        "Without an epoch, the position is an LSN of the sink's present epoch.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the command `search` to the app."""
    app.command()(search)


def search(  # noqa: PLR0913, PLR0917 - one parameter per option
    table: TableArgument,
    words: WordsArgument,
    config: ConfigOption = DEFAULT_CONFIG,
    limit: SearchLimitOption = 10,
    after: AfterOption = None,
    sink: SearchSinkOption = None,
    min_position: MinPositionOption = None,
    timeout: WaitOption = "10s",
    json: JsonOption = False,
) -> None:
    """Find rows of a table by the words in them, best match first."""
    from cdc.config import load_definition
    from cdc.targets.search_query import SearchRequest, search_table

    request = SearchRequest(
        table=table,
        words=words,
        limit=limit,
        after=after,
        sink=sink,
        min_position=min_position,
        timeout=parse_seconds(timeout, "--timeout"),
    )
    answer = search_table(load_definition(config), request)
    more = "" if answer.next is None else "; further rows are left out because of --limit"
    summary = f"{len(answer.rows)} rows of {answer.topic} at {answer.position}{more}"
    if json:
        emit("search", json=True, summary=summary, result=answer.to_json())
        return
    for row in answer.rows:
        _print(row)
    emit("search", json=False, summary=summary)


def _print(row: FoundRow) -> None:
    cells = (f"{name}={_shorten(value)}" for name, value in row.source.items() if value is not None)
    echo(f"{row.score:6.2f}  {escaped_for_terminal('  '.join(cells))}")


def _shorten(value: str) -> str:
    value = value.replace("\n", " ")
    return value if len(value) <= _CELL else value[: _CELL - 1] + "…"
