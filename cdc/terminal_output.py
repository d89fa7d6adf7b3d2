"""Output of commands: one JSON envelope, or text lines, each error followed by its remedy."""

from __future__ import annotations

import json as encoder
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final, TextIO

from cdc.errors import CdcError, ConfigError


class LineMark(StrEnum):
    """Symbol at the start of an output line."""

    #: Success.
    GOOD = "✓"
    #: A warning.
    ADVICE = "⚠"
    #: An error.
    BAD = "✗"


_COLOURS: Final = {LineMark.GOOD: "32", LineMark.ADVICE: "33", LineMark.BAD: "31"}
_PLAIN: Final = {LineMark.GOOD: "ok", LineMark.ADVICE: "!", LineMark.BAD: "x", "→": "->"}
"""ASCII replacements for terminals that cannot print the symbols."""
_MARKS: Final = (0x061C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A), *range(0xD800, 0xE000))
"""Invisible characters that reorder or break text, and unpaired surrogates."""
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in _MARKS
}
_CONTROL_IN_JSON: Final = {code: f"\\u{code:04x}" for code in (*range(127, 160), *_MARKS)}
"""Characters that the JSON encoder does not escape by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """An error in an envelope; path, line and column are set if it is in a file."""

    code: str
    message: str
    suggestion: str | None
    path: str | None = None
    line: int | None = None
    column: int | None = None

    @classmethod
    def of(cls, error: CdcError) -> ErrorReport:
        """The report of an error; path and line are those of the first issue of a definition."""
        flaws = error.issues if isinstance(error, ConfigError) else ()
        report = cls(code=error.code, message=error.message, suggestion=error.fix)
        if not flaws:
            return report
        return replace(report, path=flaws[0].path, line=flaws[0].line, column=flaws[0].column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Envelope of all `--json` output."""

    command: str
    ok: bool
    summary: str
    result: Any = None
    error: ErrorReport | None = None

    def __str__(self) -> str:
        return json_text(asdict(self))


def emit(command: str, *, json: bool, summary: str, result: Any = None, ok: bool = True) -> None:
    """Print the result of a command: its JSON envelope, or one line with ✓ (✗ when not ok)."""
    if json:
        print(Envelope(command=command, ok=ok, summary=summary, result=result), flush=True)
    else:
        line(LineMark.GOOD if ok else LineMark.BAD, summary)


def line(mark: LineMark, text: str, *, fix: str | None = None, to: TextIO | None = None) -> None:
    """Print one text line, and the remedy below it."""
    stream = to or sys.stdout
    sign = _sign(mark, stream)
    if _coloured(stream):
        sign = f"\x1b[{_COLOURS[mark]}m{sign}\x1b[0m"
    print(sign, escaped_for_terminal(text), file=stream, flush=fix is None)
    if fix:
        print(" ", _sign("→", stream), escaped_for_terminal(fix), file=stream, flush=True)


def fail(command: str, error: CdcError, *, json: bool) -> None:
    """Print an error: its JSON envelope on standard output, or text lines on standard error."""
    if json:
        result = {"flaws": [asdict(flaw) for flaw in error.issues]} if isinstance(error, ConfigError) else None
        report = ErrorReport.of(error)
        print(Envelope(command=command, ok=False, summary=_first_line(error), result=result, error=report), flush=True)
        return
    *early, last = list(_lines(error))
    for text in early:
        line(LineMark.BAD, text, to=sys.stderr)
    line(LineMark.BAD, last, fix=error.fix, to=sys.stderr)


def escaped_for_terminal(text: str) -> str:
    """The text with control characters escaped, so that it is harmless to a terminal."""
    return text.translate(_CONTROL)


def json_text(value: Any) -> str:
    """One line of JSON that is harmless to a terminal."""
    return encoder.dumps(value, ensure_ascii=False, default=str).translate(_CONTROL_IN_JSON)


def echo(*values: object, sep: str = " ", end: str = "\n", to: TextIO | None = None, flush: bool = False) -> None:
    """Print values with control characters escaped; commands print all foreign names with it."""
    print(sep.join(escaped_for_terminal(str(value)) for value in values), end=end, file=to, flush=flush)


def echo_source(text: str, *, end: str = "\n") -> None:
    """Print SQL or a shell command unchanged, or escaped if standard output is a terminal."""
    print(escaped_for_terminal(text) if sys.stdout.isatty() else text, end=end)


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Rows of cells as lines with aligned columns; right: indices of right-aligned columns."""
    texts = [[escaped_for_terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = [">" if index in right else "<" for index in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in texts
    ]


def _lines(error: CdcError) -> Iterator[str]:
    flaws = error.issues if isinstance(error, ConfigError) else ()
    yield from (f"{flaw.code} {flaw}" for flaw in flaws)
    if not flaws:
        yield f"{error.code} {error.message}"


def _first_line(error: CdcError) -> str:
    return error.message.partition("\n")[0]


def _coloured(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _sign(sign: str, stream: TextIO) -> str:
    try:
        sign.encode(stream.encoding or "utf-8")
    except UnicodeEncodeError:
        return _PLAIN[sign]
    return str(sign)
