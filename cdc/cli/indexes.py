"""`cdc indexes`: list the indexes of a sink on a search server, and drop those that a replay has replaced."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption, YesOption, audit, confirm, parse_seconds
from cdc.command_output import aligned, counted, echo, emit
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from cdc.config import Definition, SearchSinkDefinition
    from cdc.targets.search_server.index_inventory import ListedIndex

SinkArgument = Annotated[
    str, typer.Argument(help="Name of a search sink with engine opensearch or elasticsearch.", metavar="SINK")
]
IndexArgument = Annotated[
    list[str] | None,
    typer.Argument(help="Drop only these indexes [default: all unused indexes of the sink].", metavar="[INDEX]…"),
]
OlderThanOption = Annotated[
    str,
    typer.Option("--older-than", help="Drop only indexes that are unused for this long, for example 12h or 1d."),
]


def register(app: typer.Typer) -> None:
    """Add the command group `indexes` to the app."""
    group = typer.Typer(
        no_args_is_help=True, help="List the indexes of a search server sink, or drop old ones.", rich_markup_mode=None
    )
    group.command()(ls)
    group.command()(drop)
    app.add_typer(group, name="indexes")


def ls(sink: SinkArgument, config: ConfigOption = DEFAULT_CONFIG, json: JsonOption = False) -> None:
    """List each index that the sink created: its table, documents and size, and whether it is in use.

    An index is in use, being built, or unused. A replay leaves the old indexes unused; 'cdc indexes drop' removes them.
    """
    from cdc.catalog import Catalog
    from cdc.catalog.process_lease import is_replay_running
    from cdc.service import number_format

    definition, wanted, log_id = _open(config, sink)
    with Catalog.open(definition.catalog.url, migrate=False) as catalog:
        replaying = is_replay_running(catalog, definition.name, sink)
    found = _list(wanted, log_id, replaying=replaying)
    unused = [index for index in found if index.unused_since is not None]
    size = number_format.format_size(sum(index.bytes for index in unused))
    summary = f"{counted(len(found), 'index')} of sink {sink!r}; {len(unused)} unused, with {size}"
    if json:
        emit("indexes ls", json=True, summary=summary, result={"indexes": [index.to_json() for index in found]})
        return
    _print(found)
    emit("indexes ls", json=False, summary=summary)


def drop(  # noqa: PLR0913, PLR0917 - one parameter per option
    sink: SinkArgument,
    indexes: IndexArgument = None,
    older_than: OlderThanOption = "0s",
    config: ConfigOption = DEFAULT_CONFIG,
    yes: YesOption = False,
    json: JsonOption = False,
) -> None:
    """Delete unused indexes of the sink from the search server.

    The command deletes only indexes that this sink created, that are behind no alias, and that no replay builds. While
    a replay of the sink runs, the command refuses to start.
    """
    import time

    from cdc.catalog import Catalog
    from cdc.catalog.process_lease import sole_replay
    from cdc.service import number_format
    from cdc.targets.search_server.client import SearchClient
    from cdc.targets.search_server.index_inventory import drop_index, select_unused

    before = time.time() - parse_seconds(older_than, "--older-than")
    definition, wanted, log_id = _open(config, sink)
    with Catalog.open(definition.catalog.url) as catalog, sole_replay(catalog, definition.name, sink):
        chosen = select_unused(_list(wanted, log_id, replaying=False), indexes or (), before)
        if chosen and not json:
            _print(chosen)
        size = number_format.format_size(sum(index.bytes for index in chosen))
        if chosen:
            confirm(f"delete {counted(len(chosen), 'unused index')} of sink {sink!r}, with {size}", yes=yes)
        with SearchClient(wanted.access, wanted.engine) as client:
            dropped = [index for index in chosen if drop_index(client, index.name)]
    result = {"sink": sink, "dropped": [index.name for index in dropped], "bytes": sum(one.bytes for one in dropped)}
    if dropped:
        audit(definition, "indexes.drop", sink, result, json=json)
    deleted = f"deleted {counted(len(dropped), 'index')} of sink {sink!r}, with {size}"
    emit("indexes drop", json=json, summary=deleted if dropped else "no index to delete", result=result)


def _open(config: Path, name: str) -> tuple[Definition, SearchSinkDefinition, str]:
    """Return the definition, its sink with this name, and the id of the log; raise ConfigError for another sink."""
    from cdc.config import load_definition
    from cdc.config.sinks import sinks_on_search_servers
    from cdc.log.reader import LogReader

    definition = load_definition(config)
    sinks = {sink.name: sink for sink in sinks_on_search_servers(definition.sinks)}
    if name not in sinks:
        names = ", ".join(map(repr, sinks)) or "none"
        raise ConfigError(
            f"pipeline {definition.name!r} has no sink {name!r} on a search server",
            remedy=f"name a search sink with a server; this definition has: {names}",
        )
    return definition, sinks[name], LogReader(definition.log.root).log_id


def _list(sink: SearchSinkDefinition, log_id: str, *, replaying: bool) -> list[ListedIndex]:
    from cdc.targets.search_server.client import SearchClient
    from cdc.targets.search_server.index_inventory import list_indexes

    with SearchClient(sink.access, sink.engine) as client:
        client.check()
        return list_indexes(client, sink.name, log_id, replaying=replaying)


def _print(indexes: Sequence[ListedIndex]) -> None:
    if indexes:
        for text in aligned([("index", "table", "documents", "size", ""), *map(_cells, indexes)], right={2, 3}):
            echo(text)


def _cells(index: ListedIndex) -> tuple[str, ...]:
    from datetime import UTC, datetime

    from cdc.service import number_format

    since = None if index.unused_since is None else datetime.fromtimestamp(index.unused_since, UTC)
    use = index.use.value if since is None else f"{index.use.value} since {since:%Y-%m-%d %H:%M:%S}"
    return index.name, index.topic, f"{index.documents:,}", number_format.format_size(index.bytes), use
