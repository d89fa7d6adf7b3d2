"""Nulled values: values of the source that a target has as NULL, because their type there cannot represent them."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from cdc.table import Column, TableSchema
from pipelines.types.families import Policy, TypePolicy, family_of
from pipelines.types.typed_rows import text_columns


def may_be_nulled(column: Column, policy: Policy) -> bool:
    """Return whether values of a column become null under a policy if their type cannot represent them."""
    if policy.of(column.name) is not TypePolicy.NULLED or column.key is not None:
        return False
    family = family_of(column, policy)
    return not pa.types.is_nested(family.arrow) and not pa.types.is_string(family.arrow)


def count_nulled(images: pa.Table, schema: TableSchema, policy: Policy) -> int:
    """Return the number of values in row images that become null because their type cannot represent them."""
    columns = [(number, column) for number, column in enumerate(schema.sent) if may_be_nulled(column, policy)]
    if not columns:
        return 0
    texts = text_columns(images.filter(pc.not_equal(images["op"], "d")), schema)
    return sum(
        family_of(column, policy).convert(texts[number]).null_count - texts[number].null_count
        for number, column in columns
    )
