"""Definition of a sink that is a full-text search index: its keys, and its rules for single tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from cdc.config.field_types import Glob, Identifier, Location, Model, Name, invalid, is_remote, placeholders
from cdc.config.search_server import SearchServer
from cdc.config.sink_definition import SinkDefinition
from cdc.config.sink_rules import (
    DeadLetterSettings,
    Disagreement,
    KeyConflict,
    column_conflicts,
    exclusive_keys,
    overridden,
    rule_of,
    with_target_columns,
)
from cdc.config.transform import Transform
from cdc.config.views import with_views
from cdc.config.yaml_document import Key
from cdc.table import TableSchema


class IndexChanges(StrEnum):
    """How an index on a search server follows a change that its mapping cannot take."""

    #: Apply every change that the mapping can take; stop the table at another one.
    EVOLVE = "evolve"
    #: As `evolve`, but build a new index of the table from the log, next to the old one, instead of stopping.
    REBUILD = "rebuild"


def _index_path(path: str) -> str:
    if set(placeholders(path)) - {"schema", "table"}:
        raise invalid("unknown placeholder: expected {schema} or {table}")
    return path


class SearchSettings(Model):
    """Which columns a search sink stores. The keys of a sink apply to all its tables; those of a rule override them."""

    column_list: tuple[Identifier, ...] = ()
    """Columns of the source that are selected for the index; must include the key. Default all columns."""
    except_column_list: tuple[Identifier, ...] = ()
    """Columns of the source that the index does not have; alternative to `column_list`."""
    fields: tuple[Identifier, ...] = ()
    """Columns of the source that the index has besides the key; default every selected column. The words of those that
    are text can be searched; the others are only stored. A masked column is text."""

    @property
    def selecting_lists(self) -> tuple[tuple[str, ...], ...]:
        """Lists of columns; the index has only columns that are in each list that is not empty."""
        return (self.column_list, self.fields)


class SearchRule(SearchSettings):
    """Settings for the tables that a glob matches; they override those of the search sink."""

    match: Glob
    """Glob over `schema.table`; the first rule that matches a table applies to it."""
    transform: Transform | None = None
    """Transformation of the rows before they are written to the index; default none. `computed` and `where` are not
    possible."""


class SearchSinkDefinition(SearchSettings, SinkDefinition):
    """A sink that is a full-text search index over the rows of its tables."""

    type: Literal["search"]
    name: Name
    """Name of the sink, unique in the pipeline."""
    engine: Literal["tantivy", "opensearch", "elasticsearch"] = "tantivy"
    """Search engine: `tantivy` keeps one index in a local directory; the others are servers with an index per table."""
    path: Annotated[Location, AfterValidator(_index_path)] = ""
    """Local directory of the index; only for engine `tantivy`, which requires it."""
    server: SearchServer | None = None
    """Access to the server; only for the engines `opensearch` and `elasticsearch`, which require it."""
    schema_changes: IndexChanges = IndexChanges.EVOLVE
    """What happens at a change that the mapping of a table's index cannot take, such as another type of a column:
    `evolve` stops the table, `rebuild` builds a new index of the table from the log while searches use the old one.
    `rebuild` is only for engines with a server."""
    tables: Annotated[tuple[Glob, ...], Field(min_length=1)] = ("*.*",)
    """Globs over `schema.table` of the captured tables that go to this sink; default all."""
    views: tuple[Glob, ...] = ()
    """Globs over `schema.table` of the views that go to this sink; default none. Without `tables`, the sink has no
    tables. With both, the views are in a sink of their own, NAME_views."""
    views_of: Name | None = None
    """Sink of tables to which this sink of views belongs. cdc sets it for a sink that has tables and views."""
    rules: tuple[SearchRule, ...] = ()
    """Settings for single tables. The first rule that matches a table applies; settings that the rule leaves out are
    taken from the sink."""
    dead_letters: DeadLetterSettings = DeadLetterSettings()
    """Limits for rows that the index rejects."""

    @model_validator(mode="after")
    def _place(self) -> Self:
        wanted, other = ("path", "server") if self.engine == "tantivy" else ("server", "path")
        if not getattr(self, wanted):
            raise invalid("engine {engine} requires the key {key}", engine=self.engine, key=repr(wanted))
        if getattr(self, other):
            raise invalid("engine {engine} has no key {key}", engine=self.engine, key=repr(other))
        if self.engine == "tantivy" and self.schema_changes is IndexChanges.REBUILD:
            raise invalid("'schema_changes: rebuild' requires engine opensearch or elasticsearch")
        return with_views(self, may_have_both=True)

    @property
    def kind(self) -> str:
        """See SinkDefinition.kind. An index in a local directory and indexes on a server are two kinds of sink."""
        return "search" if self.server is None else "search_server"

    @property
    def product(self) -> str:
        """See SinkDefinition.product."""
        return self.engine

    @property
    def location(self) -> str:
        """Where the index is: a local directory, or the URL of the server with the alias of its indexes."""
        return self.path if self.server is None else f"{self.server.url}/{self.server.index}"

    @property
    def access(self) -> SearchServer:
        """The access to the server. Raises ValueError for an engine without a server."""
        if self.server is None:
            raise ValueError(f"sink {self.name!r} has engine {self.engine!r}: expected a search server")
        return self.server

    @property
    def directory(self) -> str:
        """See SinkDefinition.directory."""
        return self.path

    @property
    def has_one_target(self) -> bool:
        """See SinkDefinition.has_one_target. On a server each table has an index of its own."""
        return self.server is None

    @property
    def only_the_driver_writes(self) -> bool:
        """See SinkDefinition.only_the_driver_writes: the driver has the lock of a local index."""
        return self.server is None

    @property
    def normalizes_json(self) -> bool:
        """See SinkDefinition.normalizes_json: the documents of a server have json values as JSON."""
        return self.server is not None

    @property
    def keys_of_views(self) -> Mapping[str, str]:
        """See SinkDefinition.keys_of_views. A local index has one writer."""
        return {"path": f"{self.path.rstrip('/')}_views"} if self.path else {}

    def rule(self, topic: str) -> SearchRule | None:
        """See SinkDefinition.rule."""
        return rule_of(topic, self.rules)

    def settings(self, topic: str) -> SearchSettings:
        """See SinkDefinition.settings."""
        return search_settings(topic, self, self.rules)

    def selected_columns(self, schema: TableSchema) -> TableSchema:
        """See SinkDefinition.selected_columns."""
        return with_document_columns(schema, self.settings(schema.topic))

    def conflicts(self, directories: Mapping[str, str]) -> Iterator[Disagreement]:  # noqa: ARG002 - rules have no path
        """See SinkDefinition.conflicts."""
        if is_remote(self.path):
            yield Disagreement(("path",), "expected a local directory: a search index cannot be in an object store")
        yield from exclusive_keys(self, ())
        for number, rule in enumerate(self.rules):
            key: Key = ("rules", number)
            yield from exclusive_keys(rule, key)
            for name in ("computed", "where"):
                if rule.transform is not None and getattr(rule.transform, name):
                    message = "requires Spark, which a search sink does not use: use 'python', or remove the key"
                    yield Disagreement((*key, "transform", name), message)

    def column_conflicts(self, schema: TableSchema) -> Iterator[KeyConflict]:
        """See SinkDefinition.column_conflicts."""
        return column_conflicts(schema, self.rule(schema.topic), self.settings(schema.topic))


def search_settings(topic: str, sink: SearchSettings, rules: Sequence[SearchRule]) -> SearchSettings:
    """Return the settings of one table in a search sink: those of the sink, overridden by those of the table's rule."""
    return SearchSettings.model_construct(**overridden(SearchSettings, sink, rule_of(topic, rules)))


def search_fingerprint(topic: str, sink: SearchSettings, rules: Sequence[SearchRule]) -> str:
    """Return the hash of everything that decides which values a search sink stores of a table.

    The hash is keyed with the salt of the table's transform. If it changes, the stored documents have to follow.
    """
    rule = rule_of(topic, rules)
    transform = None if rule is None else rule.transform
    settings = search_settings(topic, sink, rules).model_dump(mode="json")
    text = json.dumps([settings, "" if transform is None else transform.fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def with_document_columns(schema: TableSchema, settings: SearchSettings) -> TableSchema:
    """Return the table's schema with only the columns that a search index has, before the transform of the rule."""
    selected = with_target_columns(schema, settings)
    if not settings.fields:
        return selected
    return replace(
        selected, columns=tuple(c for c in selected.columns if c.key is not None or c.name in settings.fields)
    )
