"""Row constraints: checks new rows against the NOT NULL columns, CHECK constraints and invariants of a Delta table.

Other clients add them to a target, as expressions of SQL. delta-rs checks every row that it appends, so it appends the
new rows to an empty table with the same constraints, in a temporary directory. That takes some milliseconds, and only
batches of targets with constraints pay them.
"""

from __future__ import annotations

from tempfile import TemporaryDirectory
from typing import Final

import pyarrow as pa
from deltalake import write_deltalake

from cdc.delta_protocol.commits import LOG_FOLDER, create_commit
from cdc.delta_protocol.table_storage import storage_of
from pipelines.sinks.delta.indexed.delta_log import LiveFiles
from pipelines.sinks.delta.new_data_files import with_all_columns

CHECK: Final = "delta.constraints."
"""Prefix of the table properties with CHECK constraints."""
INVARIANT: Final = "delta.invariants"
"""Key of an invariant in the metadata of a column."""


def has_constraints(files: LiveFiles, columns: pa.Schema) -> bool:
    """Return whether a table restricts the values of its rows. columns: the columns of the table."""
    checks = any(name.startswith(CHECK) for name in files.configuration)
    return (
        checks or INVARIANT in str(files.metadata.get("schemaString")) or not all(column.nullable for column in columns)
    )


def check_constraints(files: LiveFiles, rows: pa.Table, columns: pa.Schema) -> None:
    """Raise DeltaError if a row violates a constraint of the table. Columns that `rows` does not have are null.

    columns: the columns of the table.
    """
    if not rows.num_rows or not has_constraints(files, columns):
        return
    checks = {name: check for name, check in files.configuration.items() if name.startswith(CHECK)}
    metadata = files.metadata | {"configuration": checks, "partitionColumns": []}
    with TemporaryDirectory(prefix="cdc-constraints-") as folder:
        storage = storage_of(folder)
        storage.make_folder(LOG_FOLDER)
        create_commit(storage.create, 0, [{"protocol": files.protocol}, {"metaData": metadata}])
        write_deltalake(folder, with_all_columns(rows, columns), mode="append")
