"""Read-only SQL: what a query may be, and what the engine's errors say.

DataFusion executes `COPY … TO`, `CREATE`, `DROP` and `SET` as readily as a SELECT, and delta-rs passes no option that
forbids them. Its own parser decides here: DESCRIBE takes exactly one statement, which has to be a query, and runs
nothing; the plan that EXPLAIN shows then names the one query that writes, `SELECT … INTO`. A second parser of another
dialect would refuse what the engine can read, or read otherwise what the engine runs.
"""

from __future__ import annotations

import re
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
"""How the engine begins what it says of a statement; what it says of rows begins otherwise."""
_WRAPPERS: Final = re.compile(
    r"^(?:(?:External|Arrow|Parquet|Compute|Cast|Execution|Schema|SQL|Internal|Object Store) error: "
    r"|Error during planning: |This feature is not implemented: )+"
)
_PARSER: Final = re.compile(r'^ParserError\("(.*)"\)$', re.DOTALL)
_ADVERTISEMENT: Final = "This issue was likely caused by a bug in DataFusion's code"
_UNNAMED_TABLE: Final = re.compile(r"table 'datafusion\.public\.([^']*)' not found")


def require_query(builder: QueryBuilder, sql: str) -> None:
    """Raise QueryNotReadOnly unless the engine reads it as one query; EXPLAIN of a query and DESCRIBE pass too.

    The engine's own error comes out where it cannot read it.
    """
    if _DESCRIBE.match(sql):
        builder.execute(sql).read_all()  # it describes tables and queries, and refuses everything else
        return
    explained = _EXPLAIN.match(sql)
    query = sql[explained.end() :] if explained else sql
    if (word := _first_word(query)) not in _QUERIES:
        raise QueryNotReadOnly(f"a statement that begins with {word!r} is not a query")
    builder.execute(f"DESCRIBE {query}").read_all()
    plan = pa.table(builder.execute(f"EXPLAIN {query}"))["plan"][0].as_py()
    if _WRITING_PLAN.match(plan):
        raise QueryNotReadOnly("a query with INTO creates a table")


@contextmanager
def named_errors() -> Iterator[None]:
    """Around calls of the engine: raises ConfigError for what it says of the statement, QueryFailed for the rest.

    The engine's own error is the cause.
    """
    try:
        yield
    except (DeltaError, pa.ArrowException, OSError) as exc:
        raise _named(exc) from exc
    except BaseException as exc:
        if type(exc).__name__ != "PanicException":  # of its Rust; it has no importable name and is no Exception
            raise
        raise QueryFailed(f"the engine failed: {one_line(str(exc))}") from exc


def checked_rows(stream: Any) -> pa.RecordBatchReader:
    """The rows of an Arrow stream of the engine; what fails while they are read is raised as `named_errors` does."""
    reader = pa.RecordBatchReader.from_stream(stream)

    def batches() -> Iterator[pa.RecordBatch]:
        with named_errors():
            yield from reader

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


def one_line(message: str) -> str:
    """What the engine says, without the names of the layers that it passed."""
    text = message.partition(_ADVERTISEMENT)[0].rpartition("caused by\n")[2].strip()
    text = _WRAPPERS.sub("", text)
    if parsed := _PARSER.match(text):
        text = parsed[1].replace('\\"', '"')
    text = _UNNAMED_TABLE.sub(r"table '\1' not found", text)
    return " ".join(text.split())


def _named(exc: Exception) -> CdcError:
    said = one_line(str(exc)) or type(exc).__name__
    if _REFUSED.search(str(exc)):
        return ConfigError(f"query refused: {said}", remedy="correct the statement")
    return QueryFailed(f"query failed: {said}")


def _first_word(sql: str) -> str:
    found = _HEAD.match(sql)
    return found["word"].upper() if found else ""
