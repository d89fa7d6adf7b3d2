"""`cdc query`: run SQL on the Delta tables of a pipeline at the newest published cut, or at a past one."""

from __future__ import annotations

from collections.abc import Mapping
from json import dumps
from typing import Annotated, Any, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, WaitOption, parse_seconds
from cdc.command_output import echo, emit, escaped_for_terminal

Sql = Annotated[
    str,
    typer.Argument(
        help='Run this SELECT statement; name a table "schema.table", or "table" if only one schema has it.'
    ),
]
AtOption = Annotated[
    str,
    typer.Option(
        "--at",
        help="Read the tables at this version: 'published' (the newest published cut of all tables), "
        "'latest' (each table as it is now), a position, or an ISO 8601 time.",
    ),
]
SinkOption = Annotated[
    str | None,
    typer.Option("--sink", help="Query this Delta sink [default: the first Delta sink of the definition]."),
]
QueryMinPositionOption = Annotated[
    str | None,
    typer.Option(
        "--min-position",
        metavar="POSITION",
        help="Wait until the published cut has every change up to this position; write it as 16/B374D848 or "
        "2:16/B374D848. Without an epoch, the position is an LSN of the sink's present epoch.",
    ),
]
LimitOption = Annotated[int, typer.Option("--limit", min=1, help="Print at most this many rows.")]


_ANY_WIDTH: Final = 1 << 20


def register(app: typer.Typer) -> None:
    """Add the command `query` to the app."""
    app.command()(query)


def query(  # noqa: PLR0913, PLR0917 - one parameter per option
    context: typer.Context,
    sql: Sql,
    config: ConfigOption = DEFAULT_CONFIG,
    at: AtOption = "published",
    sink: SinkOption = None,
    min_position: QueryMinPositionOption = None,
    timeout: WaitOption = "10s",
    limit: LimitOption = 1_000,
    json: JsonOption = False,
) -> None:
    """Run a SELECT statement on the Delta tables; writing is not possible."""
    from cdc.config import load_definition
    from cdc.targets.read_only_guard import deny_file_writes

    definition = load_definition(config)
    if context.obj.owns_process:
        deny_file_writes()  # the second barrier; the first is the engine's parser
    from cdc.targets.table_query import QueryRequest, queried_sink, query_tables

    request = QueryRequest(
        sql=sql, at=at, limit=limit, min_position=min_position, timeout=parse_seconds(timeout, "--timeout")
    )
    answer = query_tables(queried_sink(definition, sink), request)
    summary = f"{len(answer.rows)} {'row' if len(answer.rows) == 1 else 'rows'}" + (
        f"; further rows are left out because of --limit {limit}" if answer.more else ""
    )
    result = answer.to_json()
    if json:
        emit("query", json=True, summary=summary, result=result)
        return
    _print(result["columns"], result["rows"])
    echo(summary if result["cut"] is None else f"{summary} at {_cut_text(result['cut'])}")


def _cut_text(cut: Mapping[str, Any]) -> str:
    when = f", committed {cut['committed_at']}" if cut["committed_at"] else ""
    apart = "".join(
        f"; {escaped_for_terminal(topic)} is not part of the cut: {state}"
        for topic, state in sorted(cut["apart"].items())
    )
    return f"{cut['position']}{when}{apart}"


def _print(names: list[str], rows: list[list[Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(names):
        numeric = bool(rows) and all(isinstance(row[index], int | float | None) for row in rows)
        table.add_column(Text(escaped_for_terminal(name)), justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(
            *(Text("null", style="dim") if value is None else Text(escaped_for_terminal(_cell(value))) for value in row)
        )
    console = Console()
    width = Measurement.get(console, console.options.update_width(_ANY_WIDTH), table).maximum
    if not console.is_terminal:
        Console(width=max(width, 1)).print(table)  # output to a program is not wrapped
    elif width <= console.width:
        console.print(table)
    else:
        _print_upright(names, rows)


def _print_upright(names: list[str], rows: list[list[Any]]) -> None:
    """Print rows with one column per line, because they are wider than the terminal."""
    widest = max(len(escaped_for_terminal(name)) for name in names)
    for number, row in enumerate(rows, 1):
        echo(f"── row {number}")
        for name, value in zip(names, row, strict=True):
            text = "null" if value is None else escaped_for_terminal(_cell(value))
            echo(f"  {escaped_for_terminal(name):<{widest}}  {text}")


def _cell(value: Any) -> str:
    return dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else str(value)
