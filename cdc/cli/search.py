"""`cdc search`: find rows of a table by their words, in the index of a search sink."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated

import typer

from cdc import DEFAULT_CONFIG
from cdc.cli.options import ConfigOption, JsonOption
from cdc.command_output import echo, emit, escaped_for_terminal
from cdc.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from cdc.config import Definition
    from cdc.stores.search_index_reader import FoundRow
    from cdc.stores.search_reader import SearchReader

_CELL = 60
"""Maximum number of characters per value in a line on the terminal; `--json` prints values in full."""


def register(app: typer.Typer) -> None:
    """Add the command `search` to the app."""
    app.command()(search)


def search(
    table: Annotated[
        str,
        typer.Argument(help="Search this table; write schema.table, or only the table's name if one schema has it."),
    ],
    words: Annotated[str, typer.Argument(help="Find rows with all these words; column:word searches only one column.")],
    config: ConfigOption = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Print at most this many rows.")] = 10,
    json: JsonOption = False,
) -> None:
    """Find rows of a table by the words in them, best match first."""
    from cdc.config import load_definition
    from cdc.position import Position

    index, topic = _find_index(load_definition(config), table)
    found = index.search(topic, words, limit)
    position = None if index.published is None else str(Position(index.published.position))
    summary = f"{len(found)} rows of {topic} at {position}"
    if json:
        rows = [{"key": row.key, "position": str(row.position), "score": row.score, "row": row.source} for row in found]
        emit("search", json=True, summary=summary, result={"topic": topic, "position": position, "rows": rows})
        return
    for row in found:
        _print(row)
    emit("search", json=False, summary=summary)


def _find_index(definition: Definition, table: str) -> tuple[SearchReader, str]:
    """Return the index of the first search sink that has the table, and the topic of the table.

    Raises TargetRulesChanged if the index may contain values that the rules of the sink hide.
    """
    from cdc.stores.search_reader import open_search
    from cdc.table import split_topic

    indexes = [(sink, open_search(sink)) for sink in definition.sinks if sink.type == "search"]
    if not indexes:
        raise ConfigError(
            f"pipeline {definition.name!r} has no search sink", remedy="add a sink of type search to the definition"
        )
    for sink, index in indexes:
        if (topic := _topic(index.topics, table)) is not None:
            index.check_rules(index.topics[topic], sink)
            return index, topic
    topics = {topic for _, index in indexes for topic in index.topics}
    known = ", ".join(sorted(topics)) or "none yet"
    several = any(table == split_topic(topic)[1] for topic in topics)
    raise UnknownName(
        f"the search sinks contain {'several tables' if several else 'no table'} called {table!r}",
        remedy=f"choose one of these tables: {known}",
    )


def _topic(topics: Iterable[str], table: str) -> str | None:
    from cdc.table import split_topic

    fitting = [topic for topic in topics if table in {topic, split_topic(topic)[1]}]
    return table if table in fitting else fitting[0] if len(fitting) == 1 else None


def _print(row: FoundRow) -> None:
    cells = (f"{name}={_shorten(value)}" for name, value in row.source.items() if value is not None)
    echo(f"{row.score:6.2f}  {escaped_for_terminal('  '.join(cells))}")


def _shorten(value: str) -> str:
    value = value.replace("\n", " ")
    return value if len(value) <= _CELL else value[: _CELL - 1] + "…"
