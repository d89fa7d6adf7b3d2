"""What the parts of a definition must agree on: found after each part is right by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from cdc.config.definition import Definition
from cdc.config.document import Key
from cdc.config.names import fixed_part, placeholders
from cdc.table import matches

_WILD: Final = frozenset("*?[")


class Disagreement(NamedTuple):
    """A key and why it cannot stand beside another."""

    key: Key
    message: str


def disagreements(definition: Definition) -> Iterator[Disagreement]:
    """All of them, each named at the key that a person would change."""
    yield from _names(definition)
    yield from _paths(definition)
    yield from _signals(definition)
    if not definition.catalog.url:
        yield Disagreement(("catalog",), "required key is missing: catalog.url, for the log is not on this machine")


def _names(definition: Definition) -> Iterator[Disagreement]:
    seen: set[str] = set()
    for place, sink in enumerate(definition.sinks):
        if sink.name in seen:
            yield Disagreement(("sinks", place, "name"), "another sink has this name")
        seen.add(sink.name)
    matches: set[str] = set()
    for place, rule in enumerate(definition.tables):
        if rule.match in matches:
            yield Disagreement(("tables", place, "match"), "another rule has this glob")
        matches.add(rule.match)


def _signals(definition: Definition) -> Iterator[Disagreement]:
    table = definition.snapshot.signals
    if table is not None and (not matches(table, definition.patterns) or matches(table, definition.excludes)):
        yield Disagreement(("snapshot", "signals"), "no rule captures this table: add it to tables")


def _paths(definition: Definition) -> Iterator[Disagreement]:
    taken = {definition.log.path: "the log"}
    many_schemas = len({_schema(glob) for glob in definition.patterns}) > 1
    for place, sink in enumerate(definition.sinks):
        key: Key = ("sinks", place, "path")
        names = placeholders(sink.path)
        if "table" in names and "schema" not in names and (many_schemas or _schema(definition.patterns[0]) is None):
            yield Disagreement(key, "expected {schema} in the path, for tables of several schemas may share a name")
        root = fixed_part(sink.path)
        for other, owner in taken.items():
            if _overlap(root, other):
                yield Disagreement(key, f"the directory above the first placeholder overlaps that of {owner}")
                break
        taken[root] = f"sink {sink.name!r}"


def _schema(glob: str) -> str | None:
    """The one schema that the glob can match, or None."""
    schema = glob.partition(".")[0]
    return None if _WILD & set(schema) else schema


def _overlap(one: str, other: str) -> bool:
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")
