"""Words of other tools that a definition has not: why there is none, and what does the same; pure."""

from __future__ import annotations

from typing import Final

_EVERY_ROW: Final = "every row of the log says it already"
_NULLS: Final = "here a NULL and a column that was not sent are two things, and a NULL is a value like any other"

AUTO_CDC: Final = {
    "keys": f"{_EVERY_ROW}: its key is the primary key at the source, or its replica identity",
    "sequence_by": f"{_EVERY_ROW}: the log is in the order of commits",
    "apply_as_deletes": f"{_EVERY_ROW}: a delete at the source is one here; 'mode: soft_delete' keeps the row, marked, "
    "and 'transform: {where: …}' lets go of others",
    "apply_as_truncates": f"{_EVERY_ROW}: a truncate at the source is one here",
    "ignore_null_updates": _NULLS,
    "ignore_null_updates_column_list": _NULLS,
    "ignore_null_updates_except_column_list": _NULLS,
    "columns_to_update": f"{_EVERY_ROW}: a column that was not sent keeps what it has",
    "where": "a condition stands under transform, of a rule",
}
"""Arguments of AUTO CDC (`create_auto_cdc_flow`) that a Delta sink and its rules have not; they have its others."""

TRANSFORM: Final = {
    "mask": "{email: redact}",
    "drop": "[email]",
    "rename": "{email: address}",
    "computed": "{total: price * amount}",
    "python": "company.rules:users",
}
"""Keys of a rule's transform with a value each, for who writes them under the sink or the rule itself."""

POLICIES: Final = {"reject": "'exact' is that policy, for it refuses what a type cannot hold and changes nothing"}
"""Words for a policy of types that is called otherwise here."""
