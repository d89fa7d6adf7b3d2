"""TableTransform: drops, renames and masks the columns of one table by a rule, and calls the rule's Python function.

The rule changes the schema with which `typed_rows` converts images. A dropped column is not converted at all. A renamed
column has its new name and its old id. A masked column has type text, so its mask reads the value as Postgres prints
it. For an unsent column, the merge keeps the target's value, which is already masked. The transform gives the same
result on driver and executors.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Transform
from cdc.errors import ExecutorPythonUnusable, TransformFailed
from cdc.table import Column, TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from cdc.targets.column_mask import Mask, transformed_columns
from pipelines.runtime.worker_process import is_task
from pipelines.types import ColumnPolicies, Policy
from pipelines.types.typed_rows import sent_cells, target_schema, typed_rows

_ORDER: Final = (POSITION_COLUMN, ORDINAL_COLUMN)


@dataclass(frozen=True, slots=True)
class TableTransform:
    """Applies the transform of a rule to the rows of one table. Executors receive a pickled instance."""

    rule: Transform
    schema: TableSchema
    """The table's schema after the drops, renames and masks of the rule; a column has the same id as at the source."""
    masks: Mapping[int, Mask]
    """Column id → mask."""

    @classmethod
    def of(cls, rule: Transform, schema: TableSchema) -> Self:
        """Create the transformation of a rule for a table. Raises TransformFailed if the rule names an unknown column
        or changes the key.
        """
        return cls(rule, *transformed_columns(rule, schema))

    def row_schema(self, policy: Policy) -> pa.Schema:
        """Return the schema of the table that `rows` returns: the columns of the target, except computed ones.

        If the rule has a Python function, the function is called with an empty table to get its columns. Raises
        TransformFailed if the call fails.
        """
        typed = target_schema(self.schema, policy)
        return typed if self.rule.python is None else self._call_python(typed.empty_table()).schema

    def rows(self, images: pa.Table, policy: Policy) -> pa.Table:
        """Convert folded upserts to typed rows with the schema `row_schema`; mask them and apply the Python function.

        An unsent column has a placeholder, see `typed_rows`. Raises the errors of `typed_rows`. Raises TransformFailed
        if the Python function fails, or if it changes the number of rows or a key. Also raises it if the function would
        get a partial image.
        """
        if self.rule.python is not None and not _are_complete(images):
            raise TransformFailed(
                f"updates of table {self.schema.topic!r} do not contain unchanged large values, "
                f"but function {self.rule.python!r} needs complete rows",
                remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, then 'cdc replay SINK --tables TABLE'",
            )
        typed = typed_rows(images, self.schema, policy)
        for number, column in enumerate(self.schema.sent):
            if column.id in self.masks:
                masked = self.masks[column.id](typed.column(number))
                typed = typed.set_column(number, typed.schema.field(number), masked)
        return typed if self.rule.python is None else self._call_python(typed)

    def missing(self, column: Column) -> str | None:
        """Return `column.missing`, the value in rows older than ADD COLUMN … DEFAULT, masked if the rule masks it."""
        mask = self.masks.get(column.id)
        return column.missing if mask is None else mask.of_text(column.missing)

    def settled(self, images: pa.Table) -> pa.Table:
        """Mark as complete each partial image whose unsent columns are all dropped by the rule."""
        is_complete = pc.or_kleene(images["complete"], pa.array(sent_cells(images, self.schema).all(axis=0)))
        return images.set_column(images.column_names.index("complete"), "complete", is_complete)

    @property
    def fingerprint(self) -> str:
        """Hash of the transform, keyed with its salt. If it changes, a replay must rewrite the target."""
        return self.rule.fingerprint

    def _call_python(self, rows: pa.Table) -> pa.Table:
        function, topic = _import_function(self.rule.python or ""), self.schema.topic
        given = rows.drop_columns(list(_ORDER))
        try:
            returned = function(given)
        except Exception as exc:  # noqa: BLE001 - user code may raise anything; its message may contain values
            raise TransformFailed(
                f"function {self.rule.python!r} failed on rows of table {topic!r}: {type(exc).__name__}"
            ) from None
        if not isinstance(returned, pa.Table) or returned.num_rows != given.num_rows:
            raise TransformFailed(
                f"function {self.rule.python!r} did not return an Arrow table with one row for each given row of "
                f"table {topic!r}"
            )
        for key in (column_name(column.name) for column in self.schema.key):
            if key not in returned.column_names or not returned[key].equals(given[key]):
                raise TransformFailed(
                    f"function {self.rule.python!r} changed or dropped the key column {key!r} of table {topic!r}"
                )
        return _with_order(returned, rows)


def rename_columns(policy: Policy, names: Mapping[str, str]) -> Policy:
    """Return the policy for a table whose columns a rule renames; names: old name → new name."""
    if not isinstance(policy, ColumnPolicies):
        return policy
    return replace(policy, columns=tuple((names.get(name, name), of) for name, of in policy.columns))


def _are_complete(images: pa.Table) -> bool:
    return "complete" not in images.column_names or pc.all(images["complete"], min_count=0).as_py() is not False


def _with_order(returned: pa.Table, rows: pa.Table) -> pa.Table:
    """Return the columns of `returned` with the field metadata of `rows`, and append `_position` and `_ordinal` of
    `rows`.
    """
    fields = [
        rows.schema.field(field.name)
        if field.name in rows.schema.names and rows.schema.field(field.name).type == field.type
        else pa.field(field.name, field.type)
        for field in returned.schema
    ]
    order = [rows.schema.field(name) for name in _ORDER]
    return pa.Table.from_arrays(
        [*returned.columns, *(rows[name] for name in _ORDER)], schema=pa.schema([*fields, *order])
    )


def _import_function(path: str) -> Callable[[pa.Table], pa.Table]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        message = f"function {path!r} cannot be imported: {exc}"
        if is_task():  # the driver has imported it
            raise ExecutorPythonUnusable(f"Python of an executor: {message}") from exc
        raise TransformFailed(message) from exc
    checked: Callable[[pa.Table], pa.Table] = function
    return checked
