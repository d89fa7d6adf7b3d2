"""`cdc search`: words in the rows of a table, from a search sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from cdc.cli.output import DEFAULT_CONFIG, ConfigOption, JsonOption, emit, shown
from cdc.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from cdc.config import Definition, SearchSink
    from cdc.stores.search import FoundRow

_CELL = 60
"""Characters of a value on a screen; `--json` has them whole."""


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command()(search)


def search(
    table: Annotated[str, typer.Argument(help="As schema.table, or the table's name where it is the only one.")],
    words: Annotated[str, typer.Argument(help="Every word must occur; column:word asks for one column.")],
    config: ConfigOption = DEFAULT_CONFIG,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Rows at most.")] = 10,
    sink: Annotated[str | None, typer.Option(help="Which search sink; default the first.")] = None,
    json: JsonOption = False,
) -> None:
    """Find rows of a table by their words, best first."""
    from cdc.config import load
    from cdc.position import Position
    from cdc.stores.search import SearchIndex

    index = SearchIndex.open(_sink(load(config), sink).path)
    topic = _topic(index.topics, table)
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


def _sink(definition: Definition, name: str | None) -> SearchSink:
    sinks = [sink for sink in definition.sinks if sink.type == "search" and name in {None, sink.name}]
    if not sinks:
        wanted = "no search sink" if name is None else f"no search sink {name!r}"
        raise ConfigError(f"{definition.name!r} has {wanted}", remedy="add a sink of type search to the definition")
    return sinks[0]


def _topic(topics: dict[str, int], table: str) -> str:
    if table in topics:
        return table
    fitting = sorted(topic for topic in topics if topic.rpartition(".")[2] == table)
    if len(fitting) == 1:
        return fitting[0]
    known = ", ".join(sorted(topics)) or "none yet"
    raise UnknownName(f"no single table is called {table!r} in the index", remedy=f"tables of the index: {known}")


def _print(row: FoundRow) -> None:
    cells = (f"{name}={_cut(value)}" for name, value in row.source.items() if value is not None)
    print(f"{row.score:6.2f}  {shown('  '.join(cells))}")


def _cut(value: str) -> str:
    value = value.replace("\n", " ")
    return value if len(value) <= _CELL else value[: _CELL - 1] + "…"
