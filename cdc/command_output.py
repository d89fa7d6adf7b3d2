"""Output of commands: one JSON envelope, or text lines, each error followed by its remedy.

An unexpected exception is reported as an error with a code; its traceback is printed only on request.
"""

from __future__ import annotations

import errno
import json as encoder
import os
import sys
import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, TextIO

from cdc.errors import CdcError, ConfigError, FileUnusable


class LineMark(StrEnum):
    """Symbol at the beginning of an output line."""

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
"""Code points of invisible characters that reorder or break text, and of unpaired surrogates."""
_CONTROL: Final = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {
    code: f"\\u{code:04x}" for code in _MARKS
}
_CONTROL_IN_JSON: Final = {code: f"\\u{code:04x}" for code in (*range(127, 160), *_MARKS)}
"""Escapes of the control characters that the JSON encoder does not escape, by code point."""

TRACEBACK: Final = "CDC_TRACEBACK"
"""Environment variable that makes commands print the traceback of an unexpected failure."""
_OUTPUT_FAILS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
"""Error numbers of a failed write to standard output, which the shell may have redirected to a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """One error in the JSON output of a command; path, line and column are set for an error in a definition file."""

    code: str
    message: str
    suggestion: str | None
    path: str | None = None
    line: int | None = None
    column: int | None = None

    @classmethod
    def of(cls, error: CdcError) -> ErrorReport:
        """Return the report of an error; path, line and column are those of the first issue in the definition."""
        issues = error.issues if isinstance(error, ConfigError) else ()
        report = cls(code=error.code, message=error.message, suggestion=error.fix)
        if not issues:
            return report
        return replace(report, path=issues[0].path, line=issues[0].line, column=issues[0].column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """JSON object in which a command with `--json` prints its result or its error."""

    command: str
    ok: bool
    summary: str
    result: Any = None
    error: ErrorReport | None = None

    def __str__(self) -> str:
        return json_text(asdict(self))


def last_envelope(output: str) -> dict[str, Any] | None:
    """Return the last envelope in the output of a command, as JSON values; None if there is none."""
    for text in reversed(output.splitlines()):
        with suppress(ValueError):
            found = encoder.loads(text)
            if isinstance(found, dict) and "ok" in found and "summary" in found:
                return found
    return None


def emit(command: str, *, json: bool, summary: str, result: Any = None, ok: bool = True) -> None:
    """Print the result of a command: its JSON envelope, or one line with ✓ (✗ if `ok` is False) and the summary."""
    if json:
        print(Envelope(command=command, ok=ok, summary=summary, result=result), flush=True)
    else:
        line(LineMark.GOOD if ok else LineMark.BAD, summary)


def line(mark: LineMark, text: str, *, fix: str | None = None, to: TextIO | None = None) -> None:
    """Print a symbol and one line of text; print the remedy `fix` on the next line."""
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
        result = {"flaws": [asdict(issue) for issue in error.issues]} if isinstance(error, ConfigError) else None
        report = ErrorReport.of(error)
        print(Envelope(command=command, ok=False, summary=_first_line(error), result=result, error=report), flush=True)
        return
    *early, last = list(_lines(error))
    for text in early:
        line(LineMark.BAD, text, to=sys.stderr)
    line(LineMark.BAD, last, fix=error.fix, to=sys.stderr)


def error_to_report(error: BaseException, *, logs: bool = False) -> CdcError:
    """Return the error that a command reports for an exception.

    A CdcError is returned unchanged, and an OSError of a file operation becomes FileUnusable. For any other exception
    the returned error names type and line, but omits the exception's text, which may contain row values.

    logs: True if the command writes log messages to standard error; the traceback is then printed there.
    """
    if isinstance(error, CdcError):
        return error
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError | TimeoutError):
        return _unusable(error)
    if logs or os.environ.get(TRACEBACK):
        traceback.print_exception(error)
    last = traceback.extract_tb(error.__traceback__)[-1]
    return CdcError(
        f"the command failed with an unexpected {type(error).__name__} at {Path(last.filename).name}:{last.lineno}",
        remedy=f"run the command again with {TRACEBACK}=1, and report the output",
    )


def discard_output() -> None:
    """Discard buffered output, which the interpreter would otherwise write when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def escaped_for_terminal(text: str) -> str:
    """Return the text with control characters escaped, so that it is harmless to a terminal."""
    return text.translate(_CONTROL)


def json_text(value: Any) -> str:
    """Return the value as one line of JSON that is harmless to a terminal."""
    return encoder.dumps(value, ensure_ascii=False, default=str).translate(_CONTROL_IN_JSON)


def echo(*values: object, sep: str = " ", end: str = "\n", to: TextIO | None = None, flush: bool = False) -> None:
    """Print values with control characters escaped.

    Commands use this function to print names from the source and from files.
    """
    print(sep.join(escaped_for_terminal(str(value)) for value in values), end=end, file=to, flush=flush)


def echo_source(text: str, *, end: str = "\n") -> None:
    """Print SQL or a shell command unchanged, or escaped if standard output is a terminal."""
    print(escaped_for_terminal(text) if sys.stdout.isatty() else text, end=end)


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, for example `1 index` or `1,000 indexes`."""
    ending = "" if count == 1 else "es" if noun.endswith("x") else "s"
    return f"{count:,} {noun}{ending}"


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return rows of cells as lines with aligned columns; `right` has the indices of right-aligned columns."""
    texts = [[escaped_for_terminal(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    sides = [">" if index in right else "<" for index in range(len(widths))]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
        for row in texts
    ]


def _lines(error: CdcError) -> Iterator[str]:
    issues = error.issues if isinstance(error, ConfigError) else ()
    yield from (f"{issue.code} {issue}" for issue in issues)
    if not issues:
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


def _unusable(error: OSError) -> FileUnusable:
    reason = (error.strerror or type(error).__name__).lower()
    if error.filename is not None:
        return FileUnusable(f"cannot use {os.fsdecode(error.filename)!r}: {reason}")
    if error.errno in _OUTPUT_FAILS:
        discard_output()
        return FileUnusable(
            f"the output cannot be written: {reason}", remedy="free space on the file system of the output"
        )
    return FileUnusable(f"the operating system refused a file operation: {reason}")
