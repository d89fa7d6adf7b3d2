"""Table properties: creates Delta tables and sets their properties, without table features that they do not need.

delta-rs 1.6 adds the feature `variantType` to each table with deletion vectors that it creates, and to each table with
any feature when it sets a property. Readers without this feature, such as Delta Lake 3 on Spark 3.5, then refuse the
table, although no column has the type. So this module writes the commits that create a table or set properties itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from tempfile import TemporaryDirectory
from typing import Any, Final

import pyarrow as pa
from deltalake import DeltaTable, TableFeatures
from deltalake.exceptions import CommitFailedError

from cdc.log.delta_actions import Action, commit_info, decode_commit, encode_commit
from cdc.stores.unsupported_table_features import unsupported_features
from pipelines.sinks.delta.indexed.delta_log import ATTEMPTS, commit_path
from pipelines.sinks.delta.indexed.table_storage import storage_of
from pipelines.sinks.delta.target_layout import DELETION_VECTORS

_NOT_NEEDED: Final = "variantType"


def create_table(uri: str, columns: pa.Schema, **options: Any) -> DeltaTable:
    """Create an empty Delta table at `uri`, and return it. options: as for DeltaTable.create.

    Raises CommitFailedError if another client creates a table there at the same time.
    """
    with TemporaryDirectory(prefix="cdc-new-table-") as folder:
        # delta-rs decides which features the columns and properties need
        DeltaTable.create(folder, columns, raise_if_key_not_exists=False, **options)
        content = storage_of(folder).read(commit_path(0))
    created = [action for action in decode_commit(content) if "commitInfo" not in action]
    actions = [commit_info("CREATE TABLE", engineInfo="cdc"), *map(_without_feature, created)]
    storage = storage_of(uri)
    storage.make_folder("_delta_log")
    try:
        storage.create(commit_path(0), encode_commit(actions))
    except FileExistsError as exc:
        raise CommitFailedError(f"another client created a table at {uri!r}") from exc
    return DeltaTable(uri)


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
        actions = [commit_info("SET TBLPROPERTIES", engineInfo="cdc"), _metadata(table, properties)]
        try:
            storage.create(commit_path(table.version() + 1), encode_commit(actions))
        except FileExistsError:
            table.update_incremental()
            continue
        table.update_incremental()
        return
    raise CommitFailedError("other clients committed to the table during each attempt to set its properties")


def _metadata(table: DeltaTable, properties: Mapping[str, str]) -> Action:
    """Return the `metaData` action of a table, with `properties` added to its configuration."""
    found = table.metadata()
    action: Action = {
        "id": str(found.id),
        "format": {"provider": "parquet", "options": {}},
        "schemaString": table.schema().to_json(),
        "partitionColumns": found.partition_columns,
        "configuration": {**found.configuration, **properties},
    }
    optional = {"name": found.name, "description": found.description, "createdTime": found.created_time}
    return {"metaData": action | {name: value for name, value in optional.items() if value is not None}}


def _without_feature(action: Action) -> Action:
    """Remove the feature `variantType` from a `protocol` action; return any other action unchanged."""
    if "protocol" not in action:
        return action
    lists = {
        name: [feature for feature in action["protocol"][name] if feature != _NOT_NEEDED]
        for name in ("readerFeatures", "writerFeatures")
        if name in action["protocol"]
    }
    return {"protocol": action["protocol"] | lists}
