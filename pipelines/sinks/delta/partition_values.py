"""Partition values: texts of partition columns, each of which becomes the name of a directory.

Both writers refuse a text that Delta would read back as another value, or that no directory name can contain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc

from cdc.errors import ValueNotRepresentable
from pipelines.sinks.delta.merge import backticked

if TYPE_CHECKING:
    from pyspark.sql import Column

_LOST: Final = {
    "": "an empty text, which Delta cannot distinguish from NULL in a column of partition_by",
    "__HIVE_DEFAULT_PARTITION__": "the text that Delta writers use for NULL in a column of partition_by",
}
"""Text → why it does not come back as it went."""
_LONG: Final = "a text that is too long for a directory name, and a column of partition_by has one directory per value"
_NAME_BYTES: Final = 255
"""Of `column=text` in a path: NAME_MAX of the file systems of Linux and macOS; object stores take more."""
_ESCAPED: Final = r"[^A-Za-z0-9._~-]"
"""Bytes that delta-rs writes as three, as RFC 3986 has it; Spark escapes fewer."""


def check_partition_values(rows: pa.Table, parted: tuple[str, ...], topic: str) -> None:
    """Raise ValueNotRepresentable for a text in one of these columns that does not fit."""
    for name in parted:
        if why := _unfit(rows[name], _room(name)):
            raise ValueNotRepresentable(
                f"table {topic!r}: column {name!r} has {why}",
                remedy="remove the column from partition_by and rebuild the table, or partition by a computed column",
            )


def checked_partition_column(name: str) -> Column:
    """The column of that name; a row in which it has a text that does not fit fails the frame."""
    from pyspark.sql import functions as F

    column = made = F.col(backticked(name))
    kept = F.octet_length(F.regexp_replace(column, _ESCAPED, ""))
    unfit = [(F.octet_length(column) * 3 - kept * 2 > _room(name), _LONG)]
    unfit += [(column == text, why) for text, why in _LOST.items()]
    for condition, why in unfit:
        refusal = F.raise_error(F.lit(f"{ValueNotRepresentable.__name__}: column {name!r} has {why}"))
        made = F.when(condition, refusal).otherwise(made)
    return made


def _unfit(texts: pa.ChunkedArray, room: int) -> str | None:
    distinct = pc.unique(texts).cast(pa.large_string()).drop_null()
    for text, why in _LOST.items():
        if pc.any(pc.equal(distinct, text)).as_py():
            return why
    kept = pc.binary_length(pc.replace_substring_regex(distinct, _ESCAPED, ""))
    written = pc.subtract(pc.multiply(pc.binary_length(distinct), 3), pc.multiply(kept, 2))
    return _LONG if pc.any(pc.greater(written, room)).as_py() else None


def _room(name: str) -> int:
    return _NAME_BYTES - 1 - len(name.encode()) * 3
