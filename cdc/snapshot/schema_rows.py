"""Versions: which version of a table a copy writes into the log before its rows, and after them."""

from __future__ import annotations

from dataclasses import replace

from cdc.change import LOG_SCHEMA
from cdc.errors import ConfigError
from cdc.position import Position
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.snapshot.watermark_window import Chunk
from cdc.table import TableSchema, TableState


def schema_from_catalog(version: TableSchema, now: TableSchema | None, epoch: int) -> TableSchema:
    """A table as the catalogue shows it, with the log's own numbers; raises ConfigError where they cannot be told."""
    if now is None:
        raise ConfigError(f"{version.topic!r} is no longer at the source")
    if version.relation == epoch << EPOCH_SHIFT | version.oid:
        return replace(now, relation=version.relation)
    if [(c.name, c.type_oid) for c in now.sent] != [(c.name, c.type_oid) for c in version.sent]:
        raise ConfigError(
            f"{version.topic!r} has other columns than the log knows from an earlier epoch",
            remedy="cdc slots recover --new-epoch",
        )
    return replace(version, standing=now.standing)


def with_state(version: TableSchema, state: TableState) -> TableSchema:
    """The version in a state that needs no reason."""
    return replace(version, state=state, reason=None)


def schema_chunk(version: TableSchema, generation: Position | None = None) -> Chunk:
    """A chunk without rows that tells a version, and closes a full copy if a generation ends."""
    return Chunk(version.relation, version.topic, LOG_SCHEMA.empty_table(), version, generation)


def end_of_copy_chunk(version: TableSchema, began: Position) -> Chunk:
    """What closes a full copy that began at a position: everything older is gone."""
    if version.state is not TableState.SNAPSHOTTING:
        raise not_copyable_error(version)
    return schema_chunk(with_state(version, TableState.LIVE), began)


def not_copyable_error(version: TableSchema | None) -> ConfigError:
    """The end of a copy whose table is in a state in which none goes on."""
    if version is None:
        return ConfigError("the table is unknown")
    again = f"copy it anew: cdc tables resync '{version.topic}'" if version.state is TableState.NEEDS_RESYNC else None
    return ConfigError(f"{version.topic!r} became {version.state.value}: {version.reason}", remedy=again)
