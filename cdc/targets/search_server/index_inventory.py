"""Index inventory: the indexes that a search server sink created, whether they are in use, and the removal of others.

A replay builds new indexes and leaves the old ones on the server, so that a person can go back to them. An index may
be deleted if nobody reads or writes it: the published record does not name it, it is behind no alias of applications,
and no replay builds it. An index of another sink or program is never listed, so it is never deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Any, Final

from cdc.errors import ConfigError, SinkOfAnotherLog, SinkUnavailable
from cdc.targets.published_record import Published, TableRecord
from cdc.targets.search_server.client import SearchClient
from cdc.targets.search_server.index_mapping import META, UNUSED_SINCE, owner_of
from cdc.targets.search_server.index_names import number_of, write_alias
from cdc.targets.search_server.sink_state import SinkState

_ALL: Final = "expand_wildcards=all"


class IndexUse(StrEnum):
    """What an index of a sink is used for."""

    #: The published record names the index, or an alias points at it.
    IN_USE = "in use"
    #: A replay builds the index, or the apply process has created it and not published it yet.
    BEING_BUILT = "being built"
    #: An earlier index of a table, the index of a table that left the sink, or one that a replay did not publish.
    UNUSED = "unused"


@dataclass(frozen=True, slots=True)
class ListedIndex:
    """An index of a sink, as commands print it."""

    name: str
    topic: str
    documents: int
    """Number of documents, those of deleted rows included."""
    bytes: int
    use: IndexUse
    unused_since: float | None
    """Seconds since 1970; None unless the index is unused. If no time was recorded, the time of its creation."""

    def to_json(self) -> dict[str, Any]:
        """Return the index as JSON values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SinkIndex:
    """An index that a sink created."""

    name: str
    topic: str
    relation: int
    number: int
    rules: str
    """Fingerprint of the rules under which its documents were written."""


def indexes_of_sink(client: SearchClient, sink: str, log_id: str) -> list[SinkIndex]:
    """Return all indexes that a sink created from a log, sorted by name."""
    found = []
    for name, index in _own_indexes(client, sink, log_id):
        meta = _meta(index)
        found.append(SinkIndex(name, meta["topic"], meta["relation"], number_of(name), meta["rules"]))
    return found


def unused(indexes: Iterable[SinkIndex], record: Published) -> list[SinkIndex]:
    """Return the indexes that the published record does not name: earlier ones, and those of removed tables."""
    named = {table.target for table in record.tables.values()}
    return [index for index in indexes if index.name not in named]


def list_indexes(client: SearchClient, sink: str, log_id: str, *, replaying: bool) -> list[ListedIndex]:
    """Return the indexes that a sink created, sorted by name. replaying: whether a replay of the sink is running.

    Raises SinkUnavailable if the sink has created nothing yet, and SinkOfAnotherLog if it belongs to another log.
    """
    state = SinkState(client, sink)
    if not _exists(client, state.index):
        raise SinkUnavailable(
            f"the sink {sink!r} has no indexes on the search server yet",
            remedy="start 'cdc run', and wait until the sink has published a cut",
        )
    if (owner := state.owner()) != log_id:
        raise SinkOfAnotherLog(
            f"search sink {sink!r} was written from another log: {owner!r}",
            remedy="use the definition of the pipeline that writes these indexes",
        )
    found = state.published()
    tables = {} if found is None else found[0].record.tables
    sizes = client.ask("GET", f"/{client.index_prefix}*/_stats/docs,store?{_ALL}").body["indices"]
    return [
        _listed(name, index, sizes.get(name, {}), _use(name, index, tables, replaying=replaying))
        for name, index in _own_indexes(client, sink, log_id)
    ]


def drop_index(client: SearchClient, index: str) -> bool:
    """Delete an index; return False if it does not exist, because somebody else has deleted it meanwhile."""
    return client.ask("DELETE", f"/{index}", allowed=(HTTPStatus.NOT_FOUND,)).status != HTTPStatus.NOT_FOUND


def select_unused(indexes: Collection[ListedIndex], names: Collection[str], before: float) -> list[ListedIndex]:
    """Return the indexes that are unused since `before` or earlier; only those with these names, if there are any.

    Raises ConfigError for a name that the sink does not have, and for an index that is not unused.
    """
    by_name = {index.name: index for index in indexes}
    for name in names:
        if name not in by_name:
            raise ConfigError(f"the sink has no index {name!r}", remedy="run 'cdc indexes ls SINK' to see its indexes")
        if by_name[name].use is not IndexUse.UNUSED:
            raise ConfigError(
                f"index {name!r} is {by_name[name].use.value}",
                remedy="choose an index that 'cdc indexes ls SINK' shows as unused",
            )
    return [
        index
        for index in indexes
        if index.unused_since is not None and index.unused_since <= before and (not names or index.name in names)
    ]


def _use(name: str, index: Mapping[str, Any], tables: Mapping[int, TableRecord], *, replaying: bool) -> IndexUse:
    if set(index["aliases"]) - {write_alias(name)} or name in {table.target for table in tables.values()}:
        return IndexUse.IN_USE
    meta = _meta(index)
    published = tables.get(meta["relation"])
    if published is not None and published.target:
        is_new = replaying and number_of(name) > number_of(published.target)
        return IndexUse.BEING_BUILT if is_new else IndexUse.UNUSED
    if UNUSED_SINCE in meta and not replaying:
        return IndexUse.UNUSED  # its table left the sink, and has not come back
    # the first index of a table that is not published yet, unless a table with the same name has replaced the table
    replaced = any(other.topic == meta["topic"] and relation > meta["relation"] for relation, other in tables.items())
    return IndexUse.UNUSED if replaced and not replaying else IndexUse.BEING_BUILT


def _listed(name: str, index: Mapping[str, Any], sizes: Mapping[str, Any], use: IndexUse) -> ListedIndex:
    meta = _meta(index)
    created = int(index["settings"]["index"]["creation_date"]) / 1000
    return ListedIndex(
        name,
        meta["topic"],
        sizes.get("primaries", {}).get("docs", {}).get("count", 0),
        sizes.get("total", {}).get("store", {}).get("size_in_bytes", 0),
        use,
        float(meta.get(UNUSED_SINCE, created)) if use is IndexUse.UNUSED else None,
    )


def _own_indexes(client: SearchClient, sink: str, log_id: str) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, description) for each index that a sink created from a log, sorted by name."""
    indexes = client.ask("GET", f"/{client.index_prefix}*?{_ALL}").body
    return [(name, index) for name, index in sorted(indexes.items()) if owner_of(index["mappings"]) == (log_id, sink)]


def _meta(index: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the sink recorded in the mapping of its index."""
    meta: dict[str, Any] = index["mappings"]["_meta"][META]
    return meta


def _exists(client: SearchClient, index: str) -> bool:
    return client.ask("HEAD", f"/{index}", allowed=(HTTPStatus.NOT_FOUND,)).status != HTTPStatus.NOT_FOUND
