"""`cdc views`: lists the views, explains how each is computed, and computes one as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import aligned, echo, emit
from cdc.errors import UnknownName

if TYPE_CHECKING:
    from cdc.config import Definition

NameArgument = Annotated[str, typer.Argument(help="Topic of a view of the definition, schema.table.", metavar="NAME")]

SqlOption = Annotated[
    bool, typer.Option("--sql", help="Print the SQL that finds the keys; a and b are the cuts before and after.")
]


def register(app: typer.Typer) -> None:
    """Add the command group `views` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="List the views, explain how they are computed, compute one.", rich_markup_mode=None
    )
    for command in (ls, explain, refresh):
        group.command()(command)
    app.add_typer(group, name="views")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each view with its state, its position and the number of its changed rows."""
    from cdc.catalog import Catalog
    from cdc.config import load_definition
    from cdc.config.views import NAME_OF_VIEWS
    from cdc.position import Position

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        reported = {one.topic: one for one in catalog.tables.ls(definition.name) if one.sink == NAME_OF_VIEWS}
    found = []
    for view in definition.views:
        one = reported.get(view.name)
        state, position = ("not started", None) if one is None else (one.state, str(Position(one.position)))
        changed, reason = (0, None) if one is None else (one.rows, one.reason)
        key = ", ".join(view.key)
        found.append(
            {"name": view.name, "key": key, "state": state, "position": position, "rows": changed, "reason": reason}
        )
    summary = "1 view" if len(found) == 1 else f"{len(found)} views"
    if json:
        emit("views ls", json=True, summary=summary, result={"views": found})
        return
    if found:
        rows = [tuple("" if value is None else str(value) for value in one.values()) for one in found]
        for text in aligned([("name", "key", "state", "position", "changed rows", ""), *rows]):
            echo(text)
    emit("views ls", json=False, summary=summary)


def explain(
    name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, sql: SqlOption = False, json: JsonOption = False
) -> None:
    """Say how the changes of each table find the rows of a view to compute, or why the whole view is computed."""
    from cdc.config import load_definition
    from cdc.view_sql.changed_keys import InputsAtCut
    from cdc.view_sql.view_query import queries_of

    definition = load_definition(config)
    _check_name(definition, name)
    view = next(one for one in definition.views if one.name == name)
    query = queries_of(definition.views)[name]
    tables = []
    for topic, how in query.explain():
        cuts = [InputsAtCut({t: f"{t} {cut}" for t in query.inputs}, f"changed {topic} {cut}") for cut in ("a", "b")]
        found = None if query.only_refresh is not None else query.affected_keys(topic, *cuts)
        tables.append({"table": topic, "how": how, "sql": found})
    summary = f"view {name!r} is computed from the changes of {len(query.inputs)} tables"
    if query.only_refresh is not None:
        summary = f"view {name!r} is computed as a whole every {view.refresh.every:g} s: {query.only_refresh}"
    result = {"view": name, "incremental": query.only_refresh is None, "reason": query.only_refresh, "tables": tables}
    if not json:
        for table in tables:
            echo(f"{table['table']}: {table['how']}")
            if sql and table["sql"] is not None:
                echo(f"{table['sql']}\n")
    emit("views explain", json=json, summary=summary, result=result)


def refresh(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Compute a view as a whole at the next cut, and log what differs. Needed for SQL that only allows this, or after
    somebody else changed a table of the sink.
    """
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.catalog.view_requests import request_refresh
    from cdc.config import load_definition

    definition = load_definition(config)
    _check_name(definition, name)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        request_refresh(catalog, definition.name, name, getuser())
    summary = f"view {name!r} is computed at the next cut; 'cdc views ls' shows its state"
    emit("views refresh", json=json, summary=summary, result={"view": name})


def _check_name(definition: Definition, name: str) -> None:
    """Raise UnknownName if the definition has no view with this name."""
    known = [view.name for view in definition.views]
    if name not in known:
        names = ", ".join(map(repr, known)) or "none"
        raise UnknownName(f"pipeline {definition.name!r} has no view {name!r}", remedy=f"this definition has: {names}")
