"""`cdc query`: run SQL on the Delta tables of a pipeline at the newest published cut, or at a past one."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import echo, emit, escaped_for_terminal
from cdc.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from cdc.config import Definition, DeltaSinkDefinition
    from cdc.stores.published_record import Published

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
    limit: LimitOption = 1_000,
    json: JsonOption = False,
) -> None:
    """Run a SELECT statement on the Delta tables; writing is not possible."""
    from cdc.config import load_definition
    from cdc.stores.read_only_guard import deny_file_writes

    definition = load_definition(config)
    if context.obj.owns_process:
        deny_file_writes()  # the second barrier; the first is the engine's parser
    from cdc.stores.lake_reader import Lake, ReadAt, parse_at
    from cdc.stores.target_rule_changes import TargetRules

    read_at = parse_at(at)
    wanted = _find_delta_sink(definition, config, sink)
    lake = Lake.open(wanted.path, TargetRules.of(wanted))
    cut = None if read_at is ReadAt.LATEST else lake.cut(read_at)
    reader = lake.query(sql, cut or ReadAt.LATEST)
    rows, more = _read_rows(reader, limit)
    summary = f"{len(rows)} {'row' if len(rows) == 1 else 'rows'}" + (
        f"; further rows are left out because of --limit {limit}" if more else ""
    )
    if json:
        result = {"columns": reader.schema.names, "rows": rows, "more": more, "cut": cut and _cut_to_json(cut)}
        emit("query", json=True, summary=summary, result=result)
        return
    _print(reader.schema.names, rows)
    echo(summary if cut is None else f"{summary} at {_cut_text(cut)}")


def _cut_to_json(cut: Published) -> dict[str, Any]:
    """Return a cut as a JSON object; its `apart` field has the state of each table that is not part of the cut."""
    from cdc.position import Position
    from cdc.stores.cut_retention import format_time

    apart = {table.topic: table.state for table in cut.tables.values() if table.state != "streaming"}
    when = format_time(cut.committed_at) if cut.committed_at else None
    return {"position": str(Position(cut.position)), "committed_at": when, "apart": apart}


def _cut_text(cut: Published) -> str:
    named = _cut_to_json(cut)
    when = f", committed {named['committed_at']}" if named["committed_at"] else ""
    apart = "".join(
        f"; {escaped_for_terminal(topic)} is not part of the cut: {state}"
        for topic, state in sorted(named["apart"].items())
    )
    return f"{named['position']}{when}{apart}"


def _find_delta_sink(definition: Definition, config: Path, name: str | None) -> DeltaSinkDefinition:
    lakes = [sink for sink in definition.sinks if sink.type == "delta" and name in (None, sink.name)]
    if not lakes:
        wanted = "" if name is None else f" named {name!r}"
        raise ConfigError(
            f"definition {str(config)!r} has no Delta sink{wanted}",
            remedy="add a Delta sink under 'sinks', or name another Delta sink with --sink",
        )
    return lakes[0]


def _read_rows(reader: pa.RecordBatchReader, limit: int) -> tuple[list[list[Any]], bool]:
    """Return at most `limit` rows, and True if the reader has more rows."""
    rows: list[list[Any]] = []
    for batch in reader:
        columns = [column.to_pylist() for column in batch.columns]
        rows.extend([_printable(value) for value in row] for row in zip(*columns, strict=True))
        if len(rows) > limit:
            return rows[:limit], True
    return rows, False


def _printable(value: Any) -> Any:
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, date | datetime):
        return value.isoformat()
    # a JSON number loses digits of decimals, and JSON has no NaN
    return value if value is None or isinstance(value, bool | int | str) or _plain_float(value) else str(value)


def _plain_float(value: Any) -> bool:
    return isinstance(value, float) and value - value == 0


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
            *(Text("null", style="dim") if value is None else Text(escaped_for_terminal(str(value))) for value in row)
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
            text = "null" if value is None else escaped_for_terminal(str(value))
            echo(f"  {escaped_for_terminal(name):<{widest}}  {text}")
