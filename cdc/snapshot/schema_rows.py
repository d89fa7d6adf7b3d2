"""Schema rows of a copy: the `s` rows that it writes before and after the rows of a table."""

from __future__ import annotations

from dataclasses import replace

from cdc.change import LOG_SCHEMA
from cdc.errors import ConfigError
from cdc.position import Position
from cdc.postgres.column_identity import EPOCH_SHIFT
from cdc.snapshot.watermark_window import Chunk
from cdc.table import TableSchema, TableState


def schema_from_catalog(version: TableSchema, now: TableSchema | None, epoch: int) -> TableSchema:
    """The table as the catalogue shows it, with the log's relation and column numbers.

    Raises ConfigError if the table is gone, or if its columns differ from those of an earlier epoch.
    """
    if now is None:
        raise ConfigError(f"{version.topic!r} is no longer at the source")
    if version.relation == epoch << EPOCH_SHIFT | version.oid:
        return replace(now, relation=version.relation)
    if [(c.name, c.type_oid) for c in now.sent] != [(c.name, c.type_oid) for c in version.sent]:
        raise ConfigError(
            f"the columns of {version.topic!r} differ from those in the log, which are of an earlier epoch",
            remedy="run 'cdc slots recover -c FILE --new-epoch'",
        )
    return replace(version, standing=now.standing)


def with_state(version: TableSchema, state: TableState) -> TableSchema:
    """The version in another state, without a reason."""
    return replace(version, state=state, reason=None)


def schema_chunk(version: TableSchema, generation: Position | None = None) -> Chunk:
    """A chunk without rows that writes a schema version, and ends a full copy if `generation` is given."""
    return Chunk(version.relation, version.topic, LOG_SCHEMA.empty_table(), version, generation)


def end_of_copy_chunk(version: TableSchema, began: Position) -> Chunk:
    """The chunk that ends a full copy; targets then delete rows older than its start."""
    if version.state is not TableState.SNAPSHOTTING:
        raise not_copyable_error(version)
    return schema_chunk(with_state(version, TableState.LIVE), began)


def not_copyable_error(version: TableSchema | None) -> ConfigError:
    """The error for a copy whose table is in a state that does not allow it."""
    if version is None:
        return ConfigError("the stream has not described the table yet, or it is not captured")
    again = f"copy it again: cdc tables resync '{version.topic}'" if version.state is TableState.NEEDS_RESYNC else None
    return ConfigError(f"{version.topic!r} became {version.state.value}: {version.reason}", remedy=again)
