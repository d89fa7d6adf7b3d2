"""What a rule's `drop`, `rename` and `mask` make of the columns of a table; sinks and deliveries share it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.config import Transform
from cdc.config.sink_rules import transform_conflicts
from cdc.config.transform import KEEP_LAST, REDACT, SHA256
from cdc.table import Column, TableSchema
from cdc.targets.dead_letter_rows import MASKED

REDACTED: Final = "***"
_TEXT_OID: Final = 25


@dataclass(frozen=True, slots=True)
class Mask:
    """The mask of one column: converts texts to masked texts; NULL stays NULL."""

    how: str
    """The mask in the definition: `sha256`, `redact`, `keep_last:4`."""
    salt: bytes = field(default=b"", repr=False)

    @property
    def fingerprint(self) -> str:
        """Hash of the mask, keyed with the salt if the mask depends on it. Equal masks give equal masked texts."""
        salt = self.salt if self.how == SHA256 else b""
        return hmac.digest(salt, self.how.encode(), hashlib.sha256).hex()[:32]

    def __call__(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Mask texts. A text with the prefix MASKED is already masked, so only the prefix is removed."""
        plain = texts.combine_chunks() if isinstance(texts, pa.ChunkedArray) else texts
        is_masked = pc.fill_null(pc.starts_with(plain, MASKED), fill_value=False)
        if not pc.any(is_masked).as_py():
            return self._mask(plain)
        return pc.if_else(is_masked, pc.utf8_slice_codeunits(plain, len(MASKED), None), self._mask(plain))

    def over(self, text: str | None) -> str | None:
        """Mask one text of a row that will be parked, and add the prefix MASKED; return None for None.

        The prefix prevents a second masking when the row is applied again.
        """
        return None if text is None else f"{MASKED}{self.of_text(text)}"

    def of_text(self, text: str | None) -> str | None:
        """Mask one text; None stays None."""
        masked: str | None = self(pa.array([text], pa.string()))[0].as_py()
        return masked

    def _mask(self, plain: pa.Array) -> pa.Array:
        if self.how == REDACT:
            return pc.if_else(plain.is_valid(), pa.scalar(REDACTED), pa.scalar(None, pa.string()))
        if self.how == SHA256:
            # equal values are hashed once
            distinct = plain.dictionary_encode()
            hashed = [None if text is None else self._hash(text) for text in distinct.dictionary.to_pylist()]
            return pa.array(hashed, pa.string()).take(distinct.indices)
        return self._show_end(plain, int(self.how.removeprefix(f"{KEEP_LAST}:")))

    def _hash(self, text: str) -> str:
        return hmac.digest(self.salt, text.encode(), hashlib.sha256).hex()

    def _show_end(self, texts: pa.Array, shown: int) -> pa.Array:
        lengths = pc.utf8_length(texts)
        # a text that is not longer than the visible end would be visible as a whole
        visible = pc.if_else(pc.greater(lengths, shown), pc.utf8_slice_codeunits(texts, -shown, None), "")
        return pc.binary_join_element_wise(
            pc.binary_repeat("*", pc.subtract(lengths, pc.utf8_length(visible))), visible, ""
        )


def transformed_columns(rule: Transform, schema: TableSchema) -> tuple[TableSchema, Mapping[int, Mask]]:
    """Return the table's schema after the drops, renames and masks of a rule, and column id → mask.

    Raises TransformFailed if the rule names an unknown column or changes the key.
    """
    if (found := next(transform_conflicts(rule, schema), None)) is not None:
        raise found.error
    salt = b"" if rule.salt is None else rule.salt.reveal().encode()
    masks = {column.id: Mask(rule.mask[column.name], salt) for column in schema.sent if column.name in rule.mask}
    columns = tuple(_transformed(column, rule) for column in schema.columns if column.name not in rule.drop)
    return replace(schema, columns=columns), masks


def _transformed(column: Column, rule: Transform) -> Column:
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
