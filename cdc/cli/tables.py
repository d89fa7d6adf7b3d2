"""`cdc tables`: the tables of a pipeline, where each stands, and a whole copy of one again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from cdc.cli.backfill import RateOption, TablesArgument, ask_for
from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, JsonOption, Mark, emit, line

if TYPE_CHECKING:
    from cdc.service.tables import TableLine


def register(app: typer.Typer) -> None:
    """Add the group."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Tables of the pipeline.")
    for command in (ls, resync):
        group.command()(command)
    app.add_typer(group, name="tables")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List every table: its number in the log, how it is at the source, how many rows were copied, and each sink."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from cdc.catalog import Catalog
    from cdc.config import load
    from cdc.service.status import pipeline_status
    from cdc.service.tables import table_lines

    definition = load(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        status = pipeline_status(catalog, definition.name, datetime.now(UTC))
    tables = table_lines(status, definition.log.path)
    summary = f"{len(tables)} tables"
    if json:
        emit("tables ls", json=True, summary=summary, result={"tables": [asdict(table) for table in tables]})
        return
    for table in tables:
        _print(table)
    emit("tables ls", json=False, summary=summary)


def resync(
    tables: TablesArgument,
    rate: RateOption = None,
    config: ConfigOption = DEFAULT_CONFIG,
    json: JsonOption = False,
) -> None:
    """Copy whole tables again beside the stream.

    What vanished at the source while nobody watched vanishes from every sink; a needs_resync mark is taken away.
    """
    from cdc.snapshot.work import Request

    request = Request(tuple(tables), rate=rate, resync=True)
    ask_for(request, command="tables resync", config=config, json=json)


def _print(table: TableLine) -> None:
    from cdc.snapshot.progress import said

    number = "–" if table.relation is None else str(table.relation)
    sinks = "  ".join(f"{sink.sink} {sink.state}" for sink in table.sinks)
    print(f"  {table.topic:<32}{number:>8}  {table.state:<14}{table.rows:>12,} copied  {sinks}".rstrip())
    if table.progress is not None and (words := said(table.progress)):
        print(f"      {words}")
    for where, reason in (("", table.reason), *((f"{sink.sink}: ", sink.reason) for sink in table.sinks)):
        if reason:
            line(Mark.ADVICE, f"{where}{reason}")
