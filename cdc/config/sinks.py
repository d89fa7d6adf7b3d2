"""Kinds of sinks that a definition can have: the only place in `cdc.config` that knows them all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from pydantic import Field

from cdc.config.delta_sink import DeltaSinkDefinition
from cdc.config.search_sink import SearchSinkDefinition

DefinedSink = Annotated[DeltaSinkDefinition | SearchSinkDefinition, Field(discriminator="type")]


def queried_sinks(sinks: Iterable[DefinedSink]) -> list[DeltaSinkDefinition]:
    """Return the sinks whose targets are tables that SQL can read: those of queries, and of the inputs of views."""
    return [sink for sink in sinks if isinstance(sink, DeltaSinkDefinition)]


def searched_sinks(sinks: Iterable[DefinedSink]) -> list[SearchSinkDefinition]:
    """Return the sinks whose targets can be searched for words."""
    return [sink for sink in sinks if isinstance(sink, SearchSinkDefinition)]


def sinks_on_search_servers(sinks: Iterable[DefinedSink]) -> list[SearchSinkDefinition]:
    """Return the sinks whose indexes are on a search server, where a replay leaves the old ones."""
    return [sink for sink in searched_sinks(sinks) if sink.server is not None]


def has_tables_and_views(sink: DefinedSink) -> bool:
    """Whether a sink, as a definition file has it, receives tables and views."""
    return bool(sink.views) and sink.tables != sink.views


def with_views_apart(sinks: Sequence[DefinedSink]) -> tuple[DefinedSink, ...]:
    """Return the sinks, with the views of each one that has tables in a sink of their own at the end.

    Tables and views come from two logs, so each part has a position, a published record and parked rows of its own.
    """
    tables = [sink.model_copy(update={"views": ()}) if has_tables_and_views(sink) else sink for sink in sinks]
    return (*tables, *(_views_of(sink) for sink in sinks if has_tables_and_views(sink)))


def _views_of(sink: DefinedSink) -> DefinedSink:
    changes: dict[str, Any] = {"name": f"{sink.name}_views", "tables": sink.views, "views_of": sink.name}
    return sink.model_copy(update={**changes, **sink.keys_of_views})
