"""Key lists as CSV text: one key per line, with its values separated by commas."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from cdc.errors import ConfigError

Key = tuple[str, ...]


def parse_keys(lines: Iterable[str], where: str) -> tuple[Key, ...]:
    """Parse keys without duplicates; skips empty lines, and reads `""` as an empty text.

    where: name of the input for the error. Raises ConfigError with the line number.
    """
    rows = csv.reader(lines, strict=True)
    try:
        return tuple(dict.fromkeys(tuple(row) for row in rows if row))
    except csv.Error as exc:
        raise ConfigError(
            f"malformed key in line {rows.line_num} of {where}: {exc}",
            remedy='put a value with a comma, quote or line break in double quotes, and double each quote: "a,""b"',
        ) from exc


def csv_line(key: Sequence[str]) -> str:
    """Format one key as a line, without line end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(key)  # values that contain either character are quoted
    return line.getvalue().removesuffix("\r\n")
