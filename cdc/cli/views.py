"""`cdc views`: shows the views, explains how each is computed, pauses, resumes and computes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, change_pause
from cdc.command_output import aligned, echo, emit

if TYPE_CHECKING:
    from pathlib import Path

    from cdc.catalog.view_summary import ViewSummary

NameArgument = Annotated[str, typer.Argument(help="Topic of a view of the definition, schema.table.", metavar="NAME")]

SqlOption = Annotated[
    bool, typer.Option("--sql", help="Print the SQL that finds the keys; a and b are the cuts before and after.")
]


def register(app: typer.Typer) -> None:
    """Add the command group `views` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="Show, explain, pause, resume or compute views.", rich_markup_mode=None
    )
    for command in (ls, show, explain, pause, resume, refresh):
        group.command()(command)
    app.add_typer(group, name="views")


def ls(config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each view with its state, its position and the number of its changed rows."""
    from dataclasses import asdict

    from cdc.catalog import Catalog
    from cdc.catalog.view_summary import view_summaries
    from cdc.config import load_definition

    definition = load_definition(config)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        found = view_summaries(definition, catalog)
    summary = "1 view" if len(found) == 1 else f"{len(found)} views"
    if json:
        emit("views ls", json=True, summary=summary, result={"views": [asdict(one) for one in found]})
        return
    if found:
        rows = [(one.name, ", ".join(one.key), one.state, one.position, one.rows, _notice(one)) for one in found]
        texts = [tuple("" if value is None else str(value) for value in row) for row in rows]
        for text in aligned([("name", "key", "state", "position", "changed rows", ""), *texts]):
            echo(text)
    emit("views ls", json=False, summary=summary)


def show(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Show one view: its state, what computing it took since the apply process started, and its SQL."""
    from dataclasses import asdict

    from cdc.catalog import Catalog
    from cdc.catalog.view_summary import check_view_name, view_summaries
    from cdc.config import load_definition

    definition = load_definition(config)
    check_view_name(definition, name)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        result = next(asdict(one) for one in view_summaries(definition, catalog) if one.name == name)
    if not json:
        for key, value in result.items():
            if key != "sql":
                echo(f"{key + ':':15}{_plain(value)}")
        echo(f"sql:\n{result['sql']}")
    emit("views show", json=json, summary=f"view {name!r}: {result['state']}", result=result)


def explain(
    name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, sql: SqlOption = False, json: JsonOption = False
) -> None:
    """Say how the changes of each table find the rows of a view to compute, or why the whole view is computed."""
    from cdc.catalog.view_summary import check_view_name
    from cdc.config import load_definition
    from cdc.view_sql.changed_keys import InputsAtCut
    from cdc.view_sql.view_query import queries_of

    definition = load_definition(config)
    check_view_name(definition, name)
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


def pause(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Pause a view until 'cdc views resume'; its sinks keep its rows as they are, and other views continue."""
    _change("pause", name, config, json=json)


def resume(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Let a paused view continue: at the next cut it is computed as a whole, and what differs is logged."""
    _change("resume", name, config, json=json)


def refresh(name: NameArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """Compute a view as a whole at the next cut, and log what differs. Needed for SQL that only allows this, or after
    somebody else changed a table of the sink.
    """
    from getpass import getuser

    from cdc.catalog import Catalog
    from cdc.catalog.view_requests import request_refresh
    from cdc.catalog.view_summary import check_view_name
    from cdc.config import load_definition

    definition = load_definition(config)
    check_view_name(definition, name)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        request_refresh(catalog, definition.name, name, getuser())
    summary = f"view {name!r} is computed at the next cut; 'cdc views ls' shows its state"
    emit("views refresh", json=json, summary=summary, result={"view": name})


def _change(verb: str, name: str, config: Path, *, json: bool) -> None:
    from cdc.catalog.view_requests import VIEW_PAUSES
    from cdc.catalog.view_summary import check_view_name
    from cdc.config import load_definition

    definition = load_definition(config)
    check_view_name(definition, name)
    change_pause(definition, VIEW_PAUSES, f"views {verb}", name, json=json)


def _notice(view: ViewSummary) -> str | None:
    if not view.keys_left or view.seconds_left is None or view.state == "failed":
        return view.reason
    return f"{view.keys_left:,} keys left, about {view.seconds_left:.0f} s"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {one}" for key, one in value.items())
    if isinstance(value, tuple):
        return ", ".join(value)
    return "" if value is None else str(value)
