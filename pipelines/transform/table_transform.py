"""TableTransform: a rule's transform held against one version of a table; pure, the same on driver and executors.

Dropping, renaming and masking are changes of the schema that everything else reads by: a column that is dropped is
never typed, a renamed one has its new name and its old id, a masked one is text. So the mask sees the value as
Postgres prints it, and a column that was not sent keeps what the target holds, masked already.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Transform
from cdc.config.column_checks import transform_mismatches
from cdc.config.transform import KEEP_LAST, REDACT, SHA256
from cdc.errors import TransformFailed
from cdc.stores.dead_letter_rows import MASKED
from cdc.table import Column, TableSchema
from cdc.target_names import ORDINAL_COLUMN, POSITION_COLUMN, column_name
from pipelines.types import ColumnPolicies, Policy
from pipelines.types.typed_rows import sent_cells, target_schema, typed_rows

REDACTED: Final = "***"
_TEXT_OID: Final = 25
_PLACES: Final = (POSITION_COLUMN, ORDINAL_COLUMN)


@dataclass(frozen=True, slots=True)
class Mask:
    """How one column's text is hidden; text in, text out, NULL stays NULL."""

    how: str
    """As the definition says it: `sha256`, `redact`, `keep_last:4`."""
    salt: bytes = field(default=b"", repr=False)

    def __call__(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Strings of the same length; one behind MASKED is as it should be, for it has been here before."""
        plain = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        done = pc.fill_null(pc.starts_with(plain, MASKED), fill_value=False)
        if not pc.any(done).as_py():
            return self._hidden(plain)
        return pc.if_else(done, pc.utf8_slice_codeunits(plain, len(MASKED), None), self._hidden(plain))

    def over(self, text: str | None) -> str | None:
        """One text as it may be kept until it comes here again."""
        return None if text is None else MASKED + self(pa.array([text], pa.string()))[0].as_py()

    def _hidden(self, plain: pa.Array) -> pa.Array:
        if self.how == REDACT:
            return pc.if_else(plain.is_valid(), pa.scalar(REDACTED), pa.scalar(None, pa.string()))
        if self.how == SHA256:
            # equal values are hashed once
            unlike = plain.dictionary_encode()
            hashed = [None if text is None else self._hashed(text) for text in unlike.dictionary.to_pylist()]
            return pa.array(hashed, pa.string()).take(unlike.indices)
        return self._shortened(plain, int(self.how.removeprefix(f"{KEEP_LAST}:")))

    def _hashed(self, text: str) -> str:
        return hmac.digest(self.salt, text.encode(), hashlib.sha256).hex()

    def _shortened(self, texts: pa.Array, shown: int) -> pa.Array:
        lengths = pc.utf8_length(texts)
        # a text that is no longer than what is shown would be shown whole
        kept = pc.if_else(pc.greater(lengths, shown), pc.utf8_slice_codeunits(texts, -shown, None), "")
        return pc.binary_join_element_wise(pc.binary_repeat("*", pc.subtract(lengths, pc.utf8_length(kept))), kept, "")


@dataclass(frozen=True, slots=True)
class TableTransform:
    """What becomes of the rows of one table; pickled to executors."""

    rule: Transform
    schema: TableSchema
    """The table as its target has it, before computed columns: ids are those of the source."""
    masks: Mapping[int, Mask]
    """By column id."""

    @classmethod
    def of(cls, rule: Transform, schema: TableSchema) -> Self:
        """Raises TransformFailed for a column that the table does not have, and for what would undo its key."""
        if (found := next(transform_mismatches(rule, schema), None)) is not None:
            raise found.error
        salt = b"" if rule.salt is None else rule.salt.reveal().encode()
        masks = {column.id: Mask(rule.mask[column.name], salt) for column in schema.sent if column.name in rule.mask}
        columns = tuple(_rewritten(column, rule) for column in schema.columns if column.name not in rule.drop)
        return cls(rule, replace(schema, columns=columns), masks)

    def held(self, policy: Policy) -> pa.Schema:
        """The columns of `rows`: the target's without those that are computed; raises TransformFailed."""
        typed = target_schema(self.schema, policy)
        return typed if self.rule.python is None else self._by_python(typed.empty_table()).schema

    def rows(self, images: pa.Table, policy: Policy) -> pa.Table:
        """Upserts in the folded shape as `held`; a column that was not sent is a place holder, as of typed_rows.

        Raises what typed_rows does, and TransformFailed for a function that does not keep to its promise, or that
        would have to be called with a part of a row.
        """
        if self.rule.python is not None and not _whole(images):
            raise TransformFailed(
                f"updates of table {self.schema.topic!r} do not contain unchanged large values, "
                f"but {self.rule.python!r} needs complete rows",
                remedy="run ALTER TABLE … REPLICA IDENTITY FULL at the source, then 'cdc replay SINK --tables TABLE'",
            )
        typed = typed_rows(images, self.schema, policy)
        for place, column in enumerate(self.schema.sent):
            if column.id in self.masks:
                typed = typed.set_column(place, typed.schema.field(place), self.masks[column.id](typed.column(place)))
        return typed if self.rule.python is None else self._by_python(typed)

    def missing(self, column: Column) -> str | None:
        """What rows older than the column hold in the target, as text."""
        mask = self.masks.get(column.id)
        if mask is None or column.missing is None:
            return column.missing
        text: str = mask(pa.array([column.missing]))[0].as_py()
        return text

    def settled(self, images: pa.Table) -> pa.Table:
        """Images of which the target needs nothing that was not sent are complete."""
        whole = pc.or_kleene(images["complete"], pa.array(sent_cells(images, self.schema).all(axis=0)))
        return images.set_column(images.column_names.index("complete"), "complete", whole)

    @property
    def fingerprint(self) -> str:
        """See Transform.fingerprint."""
        return self.rule.fingerprint

    def _by_python(self, rows: pa.Table) -> pa.Table:
        function, topic = _imported(self.rule.python or ""), self.schema.topic
        given = rows.drop_columns(list(_PLACES))
        try:
            made = function(given)
        except Exception as exc:  # noqa: BLE001 - a stranger's function; its message may hold values of rows
            raise TransformFailed(
                f"{self.rule.python!r} failed on rows of table {topic!r}: {type(exc).__name__}"
            ) from None
        if not isinstance(made, pa.Table) or made.num_rows != given.num_rows:
            raise TransformFailed(
                f"{self.rule.python!r} did not return an Arrow table with as many rows as its argument"
            )
        for key in (column_name(column.name) for column in self.schema.key):
            if key not in made.column_names or not made[key].equals(given[key]):
                raise TransformFailed(f"{self.rule.python!r} changed the key column {key!r} of table {topic!r}")
        return _with_places(made, rows)


def renamed(policy: Policy, names: Mapping[str, str]) -> Policy:
    """The policy of a table's columns under the names that they have in the target."""
    if not isinstance(policy, ColumnPolicies):
        return policy
    return replace(policy, columns=tuple((names.get(name, name), of) for name, of in policy.columns))


def _whole(images: pa.Table) -> bool:
    return "complete" not in images.column_names or pc.all(images["complete"], min_count=0).as_py() is not False


def _with_places(made: pa.Table, rows: pa.Table) -> pa.Table:
    """The columns of `made` with what is known of those that `rows` has too, and the rows' places."""
    fields = [
        rows.schema.field(field.name)
        if field.name in rows.schema.names and rows.schema.field(field.name).type == field.type
        else pa.field(field.name, field.type)
        for field in made.schema
    ]
    places = [rows.schema.field(name) for name in _PLACES]
    return pa.Table.from_arrays(
        [*made.columns, *(rows[name] for name in _PLACES)], schema=pa.schema([*fields, *places])
    )


def _rewritten(column: Column, rule: Transform) -> Column:
    renamed = replace(column, name=rule.rename.get(column.name, column.name))
    if column.name not in rule.mask:
        return renamed
    return replace(
        renamed,
        type_oid=_TEXT_OID,
        type_name="text",
        typmod=-1,
        type_kind="b",
        base_type_oid=None,
        base_typmod=-1,
        labels=(),
    )


def _imported(path: str) -> Callable[[pa.Table], pa.Table]:
    module, _, name = path.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as exc:
        raise TransformFailed(f"function {path!r} cannot be imported: {exc}") from exc
    made: Callable[[pa.Table], pa.Table] = function
    return made
