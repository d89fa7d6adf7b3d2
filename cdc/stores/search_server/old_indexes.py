"""Old indexes: the indexes of a sink on its server, and those of them that no search needs any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cdc.stores.published_record import Published
from cdc.stores.search_server.client import SearchClient
from cdc.stores.search_server.index_mapping import META, owner_of
from cdc.stores.search_server.index_names import number_of


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
    body = client.ask("GET", f"/{client.index_prefix}*/_mapping").body
    found = []
    for name, index in body.items():
        if owner_of(index["mappings"]) == (log_id, sink):
            meta = index["mappings"]["_meta"][META]
            found.append(SinkIndex(name, meta["topic"], meta["relation"], number_of(name), meta["rules"]))
    return sorted(found, key=lambda index: index.name)


def unused(indexes: Iterable[SinkIndex], record: Published) -> list[SinkIndex]:
    """Return the indexes that the published record does not name: earlier ones, and those of removed tables."""
    named = {table.target for table in record.tables.values()}
    return [index for index in indexes if index.name not in named]
