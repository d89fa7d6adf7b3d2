"""Keys and values of other tools that a definition does not support: why, and what to write instead."""

from __future__ import annotations

from typing import Final

_EVERY_ROW: Final = "not needed, because every row of the log contains it"
_NULLS: Final = "not needed, because the log distinguishes a NULL from a column that was not sent"

AUTO_CDC: Final = {
    "keys": f"{_EVERY_ROW}: the key is the primary key at the source, or the replica identity",
    "sequence_by": f"{_EVERY_ROW}: the log is in commit order",
    "apply_as_deletes": f"{_EVERY_ROW}: deletes are applied; 'mode: soft_delete' keeps and marks the row, "
    "'transform: {where: …}' removes other rows",
    "apply_as_truncates": f"{_EVERY_ROW}: truncates at the source are applied",
    "ignore_null_updates": _NULLS,
    "ignore_null_updates_column_list": _NULLS,
    "ignore_null_updates_except_column_list": _NULLS,
    "columns_to_update": f"{_EVERY_ROW}: a column that was not sent keeps its value",
    "where": "write the condition under transform, of a rule",
}
"""Arguments of Databricks AUTO CDC (`create_auto_cdc_flow`) that a Delta sink does not have; it has the others."""

TRANSFORM: Final = {
    "mask": "{email: redact}",
    "drop": "[email]",
    "rename": "{email: address}",
    "computed": "{total: price * amount}",
    "python": "company.rules:users",
}
"""Keys of a rule's transform, each with an example value, for users who write them under the sink or the rule."""

POLICIES: Final = {"reject": "write 'exact', which rejects values that a type cannot represent"}
"""Names that other tools have for a policy of types."""
