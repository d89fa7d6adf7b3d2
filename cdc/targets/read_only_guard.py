"""Read-only guard: the check that a statement only reads, the denial of file writes, and readable engine errors.

DataFusion also executes `COPY … TO`, `CREATE`, `DROP` and `SET`, and delta-rs has no option to forbid them. The
engine's own parser decides: DESCRIBE accepts exactly one statement, which must be a query, and runs nothing. The plan
that EXPLAIN returns then shows the only query that writes, `SELECT … INTO`. A separate SQL
parser is not used: it would refuse valid queries, or understand a statement differently from the engine.

In addition `deny_file_writes` uses Landlock of Linux 5.13 and later. The kernel then denies every change of a file to
the calling thread, for its lifetime. The same applies to every thread and process that this thread starts later. Files
that are already open, such as standard output, stay writable, and so does `/dev/null`.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from deltalake import QueryBuilder
from deltalake.exceptions import DeltaError

from cdc.errors import CdcError, ConfigError, QueryFailed, QueryNotReadOnly

_BLANK: Final = r"(?:\s|--[^\n]*(?:\n|$)|/\*(?:[^*]|\*(?!/))*\*/)"
_HEAD: Final = re.compile(rf"(?:{_BLANK}|[(;])*(?P<word>\w*)", re.DOTALL)
_DESCRIBE: Final = re.compile(rf"{_BLANK}*desc(?:ribe)?\b", re.IGNORECASE)
_EXPLAIN: Final = re.compile(
    rf"{_BLANK}*explain\b(?:{_BLANK}*\(?{_BLANK}*(?:analyze|verbose|format{_BLANK}+\w+)\b{_BLANK}*,?{_BLANK}*\)?)*",
    re.IGNORECASE,
)
_QUERIES: Final = frozenset({"SELECT", "WITH", "VALUES", "FROM"})
_WRITING_PLAN: Final = re.compile(r"Create|Drop|CopyTo|Dml")
_REFUSED: Final = re.compile(
    r"SQL error|Error during planning|Schema error|This feature is not implemented|Invalid or Unsupported Configuration"
)
"""Beginnings of the engine's errors about a wrong statement; its errors about rows begin differently."""
_WRAPPERS: Final = re.compile(
    r"^(?:(?:External|Arrow|Parquet|Compute|Cast|Execution|Schema|SQL|Internal|Object Store) error: "
    r"|Error during planning: |This feature is not implemented: )+"
)
_PARSER: Final = re.compile(r'^ParserError\("(.*)"\)$', re.DOTALL)
_ADVERTISEMENT: Final = "This issue was likely caused by a bug in DataFusion's code"
_UNNAMED_TABLE: Final = re.compile(r"table 'datafusion\.public\.([^']*)' not found")


def require_query(builder: QueryBuilder, sql: str) -> None:
    """Raise QueryNotReadOnly unless the text is one query, EXPLAIN of a query, or DESCRIBE.

    Raises the engine's own error for text that it cannot parse.
    """
    if _DESCRIBE.match(sql):
        builder.execute(sql).read_all()  # DESCRIBE accepts tables and queries, and refuses everything else
        return
    explained = _EXPLAIN.match(sql)
    query = sql[explained.end() :] if explained else sql
    if (word := _first_word(query)) not in _QUERIES:
        raise QueryNotReadOnly(f"a statement that begins with {word!r} is not a query")
    builder.execute(f"DESCRIBE {query}").read_all()
    plan = pa.table(builder.execute(f"EXPLAIN {query}"))["plan"][0].as_py()
    if _WRITING_PLAN.match(plan):
        raise QueryNotReadOnly("a query with INTO is not read-only: it creates a table")


@contextmanager
def named_errors() -> Iterator[None]:
    """Translate errors of the query engine in the block: ConfigError for a wrong statement, QueryFailed otherwise.

    The cause of each raised error is the engine's own error.
    """
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as exc:
        raise _named(exc) from exc
    except BaseException as exc:
        if (
            type(exc).__name__ != "PanicException"
        ):  # a panic of the engine's Rust code; its class cannot be imported and is no Exception
            raise
        raise QueryFailed(f"the query engine failed: {one_line(str(exc))}") from exc


def checked_rows(stream: Any) -> pa.RecordBatchReader:
    """Return a reader of the query engine's rows that translates errors as `named_errors` does."""
    reader = pa.RecordBatchReader.from_stream(stream)

    def batches() -> Iterator[pa.RecordBatch]:
        with named_errors():
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def one_line(message: str) -> str:
    """Return the message of an engine error as one line, without the names of the engine's layers."""
    text = message.partition(_ADVERTISEMENT)[0].rpartition("caused by\n")[2].strip()
    text = _WRAPPERS.sub("", text)
    if parsed := _PARSER.match(text):
        text = parsed[1].replace('\\"', '"')
    text = _UNNAMED_TABLE.sub(r"table '\1' not found", text)
    return " ".join(text.split())


def _named(exc: Exception) -> CdcError:
    message = one_line(str(exc)) or type(exc).__name__
    if _REFUSED.search(str(exc)):
        return ConfigError(f"query refused: {message}", remedy="correct the statement")
    return QueryFailed(f"query failed: {message}")


def _first_word(sql: str) -> str:
    found = _HEAD.match(sql)
    return found["word"].upper() if found else ""


_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
"""Numbers of the Landlock system calls, the same on every architecture that CPython supports, except Alpha."""
_ASK_VERSION: Final = 1
_PATH_BENEATH: Final = 1
_NO_NEW_PRIVILEGES: Final = 38
_WRITE_FILE: Final = 1 << 1
_WRITES: Final = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))
"""The write rights of Landlock version 1: to write, remove and create files of every kind."""
_ADDED: Final = {2: 1 << 13, 3: 1 << 14}
"""Version of Landlock → the write right that it added: version 2, move between directories; version 3, truncate."""


def kernel_version() -> int:
    """Return the kernel's version of Landlock; 0 if Landlock is missing or forbidden to this process."""
    if not sys.platform.startswith("linux"):
        return 0
    call = ctypes.CDLL(None, use_errno=True).syscall
    return max(0, call(_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION))


def deny_file_writes() -> bool:
    """Make the kernel deny every change of a file to this thread and to threads that it starts later.

    Return False if the kernel has no Landlock. Call this function before libraries start their threads.
    """
    if (version := kernel_version()) == 0:
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    added = sum(right for since, right in _ADDED.items() if version >= since)
    handled = ctypes.c_uint64(_WRITES | added)
    ruleset = _checked(call(_CREATE_RULESET, ctypes.byref(handled), ctypes.c_size_t(ctypes.sizeof(handled)), 0))
    try:
        _allow(call, ruleset, os.devnull, _WRITE_FILE | added & _ADDED[3])
        _checked(ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        _checked(call(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return True


class _Beneath(ctypes.Structure):
    """The struct `landlock_path_beneath_attr` of Linux."""

    _pack_ = 1
    _layout_ = "ms"
    _fields_ = (("allowed", ctypes.c_uint64), ("file", ctypes.c_int32))


def _allow(call: Any, ruleset: int, path: str, rights: int) -> None:
    file = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = _Beneath(rights, file)
        _checked(call(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0))
    finally:
        os.close(file)


def _checked(returned: int) -> int:
    if returned < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return returned
