"""Table properties: creates Delta tables and sets their properties, without table features that they do not need.

delta-rs 1.6 adds the feature `variantType` to each table with deletion vectors that it creates, and to each table with
any feature when it sets a property. Readers without this feature, such as Delta Lake 3 on Spark 3.5, then refuse the
table, although no column has the type. So this module writes the commits that create a table or set properties itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from tempfile import TemporaryDirectory
from typing import Any, Final, Self

import pyarrow as pa
from deltalake import DeltaTable, TableFeatures
from deltalake.exceptions import CommitFailedError
from deltalake.schema import Schema

from cdc.delta_protocol.actions import Action, commit_info, decode_commit
from cdc.delta_protocol.commits import LOG_FOLDER, commit_path, create_commit
from cdc.delta_protocol.table_storage import storage_of
from cdc.targets.unsupported_table_features import unsupported_features
from pipelines.sinks.delta.indexed.delta_log import ATTEMPTS
from pipelines.sinks.delta.target_layout import DELETION_VECTORS, STATISTICS

_NOT_NEEDED: Final = "variantType"


@dataclass(frozen=True, slots=True)
class TableMetadata:
    """Metadata of a Delta table, without its columns."""

    id: str
    configuration: Mapping[str, str]
    """The properties of the table."""
    partition_columns: Sequence[str]
    unwritable_features: tuple[str, ...] = ()
    """Sorted names of the table features with which delta-rs cannot write the table."""

    @classmethod
    def of(cls, table: DeltaTable) -> Self:
        """Return the metadata of the version that delta-rs has read."""
        found = table.metadata()
        return cls(str(found.id), found.configuration, found.partition_columns, unsupported_features(table))


def create_table(uri: str, columns: pa.Schema, **options: Any) -> tuple[TableMetadata, list[Action]]:
    """Create an empty Delta table at `uri`; return its metadata and its first commit. options: as DeltaTable.create.

    Raises CommitFailedError if another client creates a table there at the same time.
    """
    configuration: Mapping[str, str] = options.get("configuration") or {}
    created = TableMetadata(str(uuid.uuid4()), configuration, options.get("partition_by") or [])
    metadata = _metadata(
        Schema.from_arrow(columns),
        created.partition_columns,
        configuration,
        id=created.id,
        name=options.get("name"),
        description=options.get("description"),
        createdTime=time.time_ns() // 1_000_000,
    )
    kinds = frozenset((column.type, column.nullable) for column in columns)
    properties = frozenset(
        (name, value) for name, value in configuration.items() if name.startswith("delta.") and name != STATISTICS
    )
    actions = [commit_info("CREATE TABLE", engineInfo="cdc"), _protocol(kinds, properties), metadata]
    storage = storage_of(uri)
    storage.make_folder(LOG_FOLDER)
    try:
        create_commit(storage.create_durably, 0, actions)
    except FileExistsError as exc:
        raise CommitFailedError(f"another client created a table at {uri!r}") from exc
    return created, actions


@lru_cache(maxsize=1024)
def _protocol(kinds: frozenset[tuple[pa.DataType, bool]], properties: frozenset[tuple[str, str]]) -> Action:
    """Return the `protocol` action of a new table with columns of these types and with these properties.

    delta-rs decides which features they need, by creating such a table; that takes 10 ms. kinds: (type, whether the
    column may be null) of each column.
    """
    columns = pa.schema([pa.field(f"c{number}", *kind) for number, kind in enumerate(kinds)])
    with TemporaryDirectory(prefix="cdc-new-table-") as folder:
        DeltaTable.create(folder, columns, configuration=dict(properties), raise_if_key_not_exists=False)
        content = storage_of(folder).read(commit_path(0))
    (protocol,) = (action["protocol"] for action in decode_commit(content) if "protocol" in action)
    lists = {
        name: [feature for feature in protocol[name] if feature != _NOT_NEEDED]
        for name in ("readerFeatures", "writerFeatures")
        if name in protocol
    }
    return {"protocol": protocol | lists}


def set_properties(uri: str, table: DeltaTable, properties: Mapping[str, str]) -> None:
    """Set properties of the table at `uri` in one commit that changes nothing else; `table` then has the new version.

    Raises CommitFailedError if other clients commit during each attempt.
    """
    if unsupported_features(table):  # raises an error that names them
        table.alter.set_table_properties(dict(properties), raise_if_not_exists=False)
        return
    if properties.get(DELETION_VECTORS) == "true" and "deletionVectors" not in (table.protocol().writer_features or ()):
        table.alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    storage = storage_of(uri)
    for _ in range(ATTEMPTS):
        found = table.metadata()
        metadata = _metadata(
            table.schema(),
            found.partition_columns,
            {**found.configuration, **properties},
            id=str(found.id),
            name=found.name,
            description=found.description,
            createdTime=found.created_time,
        )
        actions = [commit_info("SET TBLPROPERTIES", engineInfo="cdc"), metadata]
        try:
            create_commit(storage.create_durably, table.version() + 1, actions)
        except FileExistsError:
            table.update_incremental()
            continue
        table.update_incremental()
        return
    raise CommitFailedError("other clients committed to the table during each attempt to set its properties")


def _metadata(schema: Schema, partition_by: Sequence[str], configuration: Mapping[str, str], **more: Any) -> Action:
    """Return the `metaData` action of a table. more: its other fields; those that are None are left out."""
    action: Action = {
        "format": {"provider": "parquet", "options": {}},
        "schemaString": schema.to_json(),
        "partitionColumns": [*partition_by],
        "configuration": dict(configuration),
    }
    return {"metaData": action | {name: value for name, value in more.items() if value is not None}}
