"""Listed keys as text: one key per line, its values separated by commas and quoted as in CSV where that is needed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence

from cdc.errors import ConfigError

Key = tuple[str, ...]


def parse_keys(lines: Iterable[str], where: str) -> tuple[Key, ...]:
    """The keys of lines with their ends, each once; empty lines are passed over, an empty text is written `""`.

    Raises ConfigError that names `where` and the line.
    """
    rows = csv.reader(lines, strict=True)
    try:
        return tuple(dict.fromkeys(tuple(row) for row in rows if row))
    except csv.Error as exc:
        raise ConfigError(
            f"malformed key in line {rows.line_num} of {where}: {exc}",
            remedy='a value with a comma, a quote or a line break goes in double quotes, a quote in it twice: "a,""b"',
        ) from exc


def csv_line(key: Sequence[str]) -> str:
    """One key as a line, without its end."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(key)  # values with a part of that are quoted
    return line.getvalue().removesuffix("\r\n")
