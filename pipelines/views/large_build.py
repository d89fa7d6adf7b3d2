"""The first build of a large view: executors compute its rows and write them to files, which the driver reads in turn.

The driver needs memory for the rows of one file, and 8 bytes for each row of the view. The files are below the log
of views, in `_builds`. They have no positions yet: the log gets their rows when all of them are there.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cdc.log.bucket_files import Root, remove_folder
from cdc.log.computed_views import InputVersion
from cdc.log.table_io import open_data_file
from cdc.table import TableSchema
from pipelines.runtime.executor_code import raising_task_errors
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.table_version import RowsNotReadable
from pipelines.views.build_files import FILE, write_rows
from pipelines.views.changed_rows import ROWS, check_key
from pipelines.views.followed_inputs import opened
from pipelines.views.log_of_views import BUILDS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

LARGE: Final = 2_000_000
"""Number of rows of all inputs from which a build is large; for fewer, Python takes too long to start on executors."""
_SECRET: Final = bytes(16)


def have_rows(inputs: Iterable[InputVersion], number: int) -> bool:
    """Return whether the inputs of a view have so many rows together, or whether their number is unknown."""
    try:
        return sum(opened(version).row_count() for version in inputs) >= number
    except RowsNotReadable:
        return True


@dataclass(frozen=True, slots=True)
class LargeBuild:
    """All rows of a view, in files that only this process knows."""

    folder: Root
    names: tuple[str, ...]

    @classmethod
    def of(cls, result: DataFrame, schema: TableSchema, floor: int | None, log_of_views: Root) -> LargeBuild:
        """Compute the result of a view and write it. floor: time before which rows are left out.

        Raises ViewKeyNotUnique, and the errors of `view_rows`.
        """
        folder = log_of_views / BUILDS / uuid.uuid4().hex
        folder.mkdir(parents=True, exist_ok=True)
        write = partial(write_rows, schema=schema, floor=floor, folder=folder)
        try:
            with raising_task_errors():
                names = result.to(result.schema.toNullable()).mapInArrow(write, FILE).toArrow()["name"].to_pylist()
            build = cls(folder, tuple(names))
            build._check_key(schema)
        except BaseException:
            remove_folder(folder)
            raise
        return build

    def take(self) -> Iterator[pa.Table]:
        """Yield all rows, with key and image; afterwards the files are removed."""
        for name in self.names:
            yield self._read(name)
        self.remove()

    def remove(self) -> None:
        """Remove the files."""
        remove_folder(self.folder)

    def _read(self, name: str) -> pa.Table:
        return pq.read_table(open_data_file(self.folder / name)).cast(ROWS)

    def _check_key(self, schema: TableSchema) -> None:
        """Raise ViewKeyNotUnique if two rows have the same key: equal hashes say which rows to compare."""
        found = [np.empty(0, np.uint64)]
        found += [
            _hashes(pq.read_table(open_data_file(self.folder / name), columns=["key"])["key"]) for name in self.names
        ]
        values, counts = np.unique(np.concatenate(found), return_counts=True)
        if twice := values[counts > 1].tolist():
            suspects = []
            for name in self.names:
                rows = self._read(name)
                suspects.append(rows.filter(pa.array(np.isin(_hashes(rows["key"]), twice))))
            check_key(pa.concat_tables(suspects), schema)


def _hashes(keys: pa.ChunkedArray) -> np.ndarray:
    return hash_keys([pc.binary_join(keys.combine_chunks(), "\0")], _SECRET)[0].high
