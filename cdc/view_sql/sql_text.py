"""The text of a view's SQL: its syntax tree with the names of functions as written, its tokens, and places in it.

The SQL that Spark runs is always an edit of the user's text. Nothing is printed from a syntax tree, because a printer
that spells a function or a literal in another way changes what a view means.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from sqlglot import Token, TokenType, exp, parse_one
from sqlglot.dialects.spark import Spark
from sqlglot.errors import SqlglotError
from sqlglot.parsers.spark import SparkParser

from cdc.errors import ViewSqlInvalid

_OWN_GRAMMAR: Final = frozenset(
    {"CAST", "CEIL", "CONVERT", "EXTRACT", "FLOOR", "OVERLAY", "POSITION", "SUBSTRING", "TRIM", "TRY_CAST"}
)
"""Functions with arguments that are no list of expressions, such as EXTRACT(YEAR FROM x)."""


class _SparkNames(Spark):
    """Spark SQL in which every function keeps the name that the text has, as `exp.Anonymous`."""

    class Parser(SparkParser):
        FUNCTIONS: Final = {}  # type: ignore[misc]
        FUNCTION_PARSERS: Final = {  # type: ignore[misc]
            name: parser for name, parser in SparkParser.FUNCTION_PARSERS.items() if name in _OWN_GRAMMAR
        }
        NO_PAREN_FUNCTIONS: Final = {}  # type: ignore[misc]
        NO_PAREN_FUNCTION_PARSERS: Final = {  # type: ignore[misc]
            name: parser
            for name, parser in SparkParser.NO_PAREN_FUNCTION_PARSERS.items()
            if name in {"ANY", "CASE", "IF"}
        }


@dataclass(frozen=True)
class SqlText:
    """One query with its syntax tree and its tokens. Offsets count characters from 0."""

    view: str
    """Name of the view, for messages."""
    sql: str
    tree: exp.Query

    @classmethod
    def parse(cls, view: str, sql: str) -> Self:
        """Raises ViewSqlInvalid for a text that is not one query."""
        try:
            trees = [tree for tree in _SparkNames().parse(sql) if not isinstance(tree, exp.Semicolon | None)]
        except SqlglotError as exc:
            raise ViewSqlInvalid(f"view {view!r}{_place_of_error(exc)}: the SQL does not parse") from exc
        if len(trees) != 1 or not isinstance(trees[0], exp.Select | exp.SetOperation | exp.Subquery):
            raise ViewSqlInvalid(f"view {view!r}: the SQL is not one SELECT")
        return cls(view, sql, trees[0])

    @property
    def start(self) -> int:
        return self.tokens[0].start

    @property
    def end(self) -> int:
        """Offset after the last token; a semicolon and comments follow it."""
        return self.tokens[-1].end + 1

    def place(self, offset: int) -> str:
        """Return `line:column` of an offset; both count from 1."""
        line_start = self.sql.rfind("\n", 0, offset) + 1
        return f"{self.sql.count(chr(10), 0, offset) + 1}:{offset - line_start + 1}"

    def place_of(self, identifier: str) -> str | None:
        """Return `line:column` of the first identifier with this name, whatever its case; None if there is none."""
        wanted = identifier.lower()
        found = (token.start for token in self.tokens if token.text.lower() == wanted and not _is_string(token))
        return next(map(self.place, found), None)

    def place_of_node(self, node: exp.Expr, *words: str) -> str:
        """Return `line:column` of a node: of the first of the words in the SQL, else of the node's first name."""
        for word in words:
            if place := self.place_of(word):
                return place
        return self.place(offset_of(node) or 0)

    def without_schemas(self, topics: Container[str]) -> Self:
        """Return the SQL with blanks for the schema in columns such as `shop.orders.id`: a temporary view has none."""
        sql = self.sql
        for column in self.tree.find_all(exp.Column):
            schema = column.args.get("db")
            if schema is not None and f"{schema.name}.{column.table}" in topics:
                start, end = schema.meta["start"], column.args["table"].meta["start"]
                sql = sql[:start] + " " * (end - start) + sql[end:]
        return self if sql == self.sql else type(self).parse(self.view, sql)

    def parse_select(self, start: int, end: int) -> exp.Select:
        """Return the tree of one SELECT in the SQL; its offsets are those in the whole SQL."""
        return parse_one(" " * start + self.sql[start:end], dialect=_SparkNames, into=exp.Select)

    def parse_condition(self, start: int, end: int) -> exp.Expr:
        """Return the tree of a condition in the SQL; its offsets are those in the whole SQL."""
        return parse_one(" " * start + self.sql[start:end], dialect=_SparkNames)

    @cached_property
    def tokens(self) -> list[Token]:
        return [one for one in _SparkNames().tokenize(self.sql) if one.token_type is not TokenType.SEMICOLON]

    @cached_property
    def closing(self) -> dict[int, int]:
        """Index of each opening parenthesis among the tokens → index of the closing one."""
        opened: list[int] = []
        closing = {}
        for index, token in enumerate(self.tokens):
            if token.token_type is TokenType.L_PAREN:
                opened.append(index)
            elif token.token_type is TokenType.R_PAREN:
                closing[opened.pop()] = index
        return closing

    def outside_parentheses(self, start: int, end: int) -> Iterator[int]:
        """Yield the indices of the tokens [start, end) that are in no parentheses; of a pair only the first."""
        index = start
        while index < end:
            yield index
            index = self.closing.get(index, index) + 1


def _is_string(token: Token) -> bool:
    return token.token_type in {TokenType.STRING, TokenType.RAW_STRING}


def _place_of_error(error: SqlglotError) -> str:
    found: dict[str, object] = next(iter(getattr(error, "errors", ())), {})
    return f", {found['line']}:{found['col']}" if found.get("line") else ""


def offset_of(node: exp.Expr) -> int | None:
    """Return the offset of the first name or literal in a node; None if it has none."""
    return min((start for one in node.walk() if (start := one.meta.get("start")) is not None), default=None)


def qualifier_of(column: exp.Column) -> str | None:
    """Return the first part of the name of a column, in lower case; None if the name has one part."""
    return column.parts[0].name.lower() if len(column.parts) > 1 else None
