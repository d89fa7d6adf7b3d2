"""The syntax of the condition `when` of a delivery: a subset of Spark SQL, parsed into a tree.

The subset has only what `cdc.delivery.row_condition` evaluates with exactly the result of Spark. Everything else is
refused here, or there if it depends on the types of columns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Annotated, Final, NamedTuple, NoReturn

from pydantic import AfterValidator

from cdc.config.field_types import invalid

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|--[^\n]*|/\*.*?\*/)"""
    r"""|(?P<text>'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*")"""
    r"""|(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))"""
    r"""|`(?P<quoted>(?:[^`]|``)+)`|(?P<word>[^\W\d]\w*)"""
    r"""|(?P<sign><=>|<=|>=|<>|!=|==|\|\||[=<>(),.+\-*!])""",
    re.DOTALL,
)
_ESCAPES: Final = {"0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": "\\%", "_": "\\_"}
_ESCAPE: Final = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|([01][0-7]{2})|(.))|(''|\"\")", re.DOTALL)
_LARGEST_CODE_POINT: Final = 0x10FFFF
_SURROGATES: Final = range(0xD800, 0xE000)
COMPARISONS: Final[Mapping[str, str]] = {
    "=": "=", "==": "=", "<>": "<>", "!=": "<>", "<": "<", "<=": "<=", ">": ">", ">=": ">=", "<=>": "<=>"
}  # fmt: skip
"""Operators that compare two values → the name of the call in the tree."""
FUNCTIONS: Final[Mapping[str, tuple[int, int | None]]] = {
    "char_length": (1, 1),
    "character_length": (1, 1),
    "coalesce": (1, None),
    "concat": (1, None),
    "contains": (2, 2),
    "endswith": (2, 2),
    "if": (3, 3),
    "ifnull": (2, 2),
    "isnan": (1, 1),
    "isnotnull": (1, 1),
    "isnull": (1, 1),
    "length": (1, 1),
    "ltrim": (1, 1),
    "nullif": (2, 2),
    "nvl": (2, 2),
    "rtrim": (1, 1),
    "startswith": (2, 2),
    "substr": (2, 3),
    "substring": (2, 3),
    "trim": (1, 1),
}
"""Functions that a condition may call → least and most arguments; None: any number."""
_ALIASES: Final = {
    "char_length": "length",
    "character_length": "length",
    "ifnull": "coalesce",
    "nvl": "coalesce",
    "isnull": "is null",
    "substr": "substring",
}
_RESERVED: Final = frozenset(
    ("and", "or", "not", "is", "in", "like", "between", "case", "when", "then", "else", "end", "null", "true", "false")
)
"""Words that are no value of their own."""
_TYPED: Final = ("date", "timestamp", "timestamp_ltz", "timestamp_ntz")
_DEEPEST: Final = 30
_LONGEST: Final = 30
"""Most operands of +, - and * in a row, each of which is one level of the tree."""


@dataclass(frozen=True, slots=True)
class Literal:
    """A value that is written in the condition: bool, int, Decimal, float, str, or None for NULL."""

    value: bool | int | Decimal | float | str | None
    kind: str | None = None
    """`date`, `timestamp` or `timestamp_ntz` if the text is such a value."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A column of one image, or `op`."""

    side: str
    """`before`, `after`, or empty for `op`."""
    name: str

    def __str__(self) -> str:
        return f"{self.side}.{self.name}" if self.side else self.name


@dataclass(frozen=True, slots=True)
class Call:
    """An operator or a function with its arguments; the name of an alias is that of its function."""

    name: str
    arguments: tuple[Node, ...]


Node = Literal | Reference | Call


class ConditionSyntaxError(ValueError):
    """The text is no condition of the subset. The message names the character."""


class _Token(NamedTuple):
    kind: str
    text: str
    place: int


def parse_condition(text: str) -> Node:
    """Return the tree of a condition. Raises ConditionSyntaxError."""
    return _Parser(text).parse()


def _checked(text: str) -> str:
    try:
        parse_condition(text)
    except ConditionSyntaxError as exc:
        raise invalid("{reason}", reason=str(exc)) from exc
    return text


Condition = Annotated[str, AfterValidator(_checked)]
"""A condition of the subset of Spark SQL that deliveries evaluate."""


class _Parser:
    """Recursive descent; each method parses one level of precedence, from OR down to a single value."""

    def __init__(self, text: str) -> None:
        self._tokens = _tokens(text)
        self._next = 0
        self._depth = 0

    def parse(self) -> Node:
        """Parse the whole text."""
        node = self._or()
        if self._peek().kind != "end":
            self._fail("expected an operator or the end")
        return node

    def _or(self) -> Node:
        return self._chain("or", lambda: self._chain("and", self._not))

    def _chain(self, word: str, operand: Callable[[], Node]) -> Node:
        operands = [operand()]
        while self._takes(word):
            operands.append(operand())
        return _balanced(word, operands)

    def _not(self) -> Node:
        self._depth += 1
        if self._depth > _DEEPEST:
            self._fail("the condition is nested too deeply")
        negated = self._takes("not") or self._takes_sign("!")
        node = Call("not", (self._not(),)) if negated else self._predicate()
        self._depth -= 1
        return node

    def _predicate(self) -> Node:
        node = self._sum()
        if self._peek().kind == "sign" and self._peek().text in COMPARISONS:
            node = Call(COMPARISONS[self._take().text], (node, self._sum()))
        if self._takes("is"):
            return self._is(node)
        negated = self._takes("not")
        if self._takes("between"):
            lower = self._sum()
            self._expect("and")
            node = Call("and", (Call(">=", (node, lower)), Call("<=", (node, self._sum()))))
        elif self._takes("in"):
            node = Call("in", (node, *self._arguments()))
        elif self._takes("like"):
            node = self._like(node)
        elif negated:
            self._fail("expected BETWEEN, IN or LIKE")
        return Call("not", (node,)) if negated else node

    def _is(self, node: Node) -> Node:
        negated = self._takes("not")
        if self._takes("null"):
            found = Call("is null", (node,))
        elif self._takes("true"):
            found = Call("<=>", (node, Literal(True)))
        elif self._takes("false"):
            found = Call("<=>", (node, Literal(False)))
        elif self._takes("distinct"):
            self._expect("from")
            found = Call("not", (Call("<=>", (node, self._sum())),))
        else:
            self._fail("expected NULL, TRUE, FALSE or DISTINCT FROM")
        return Call("not", (found,)) if negated else found

    def _like(self, node: Node) -> Node:
        pattern = self._sum()
        escape: Node = Literal("\\")
        if self._takes("escape"):
            escape = self._sum()
        return Call("like", (node, pattern, escape))

    def _sum(self) -> Node:
        node = self._product()
        count = 1
        while self._peek().kind == "sign" and self._peek().text in {"+", "-", "||"}:
            name = self._take().text
            node = Call("concat" if name == "||" else name, (node, self._product()))
            count = self._counted(count)
        return node

    def _counted(self, count: int) -> int:
        if count >= _LONGEST:
            self._fail(f"expected at most {_LONGEST} operands")
        return count + 1

    def _product(self) -> Node:
        node = self._value()
        count = 1
        while self._takes_sign("*"):
            node = Call("*", (node, self._value()))
            count = self._counted(count)
        return node

    def _value(self) -> Node:
        token = self._peek()
        if self._takes_sign("("):
            node = self._or()
            self._expect_sign(")")
            return node
        if self._takes_sign("-"):
            if self._peek().kind != "number":
                self._fail("expected a number after the sign")
            return Literal(_number(f"-{self._take().text}"))
        if token.kind == "number":
            return Literal(_number(self._take().text))
        if token.kind == "text":
            return Literal(self._text())
        if token.kind not in {"word", "quoted"}:
            self._fail("expected a value")
        return self._named()

    def _named(self) -> Node:
        token = self._take()
        word = token.text.lower() if token.kind == "word" else ""
        if word in {"true", "false", "null"}:
            return Literal({"true": True, "false": False}.get(word))
        if word == "case":
            return self._case()
        if word in _TYPED and self._peek().kind == "text":
            return Literal(self._text(), word.removesuffix("_ltz"))
        if word and self._peek()[:2] == ("sign", "("):
            return self._call(word, token)
        if self._takes_sign("."):
            column = self._take()
            if column.kind not in {"word", "quoted"}:
                self._fail("expected the name of a column", column)
            return Reference(token.text, column.text)
        if word in _RESERVED:
            self._fail("expected a value", token)
        return Reference("", token.text)

    def _case(self) -> Node:
        subject = None if self._peek_word() == "when" else self._sum()
        arguments: list[Node] = []
        while self._takes("when"):
            condition = self._or()
            arguments.append(condition if subject is None else Call("=", (subject, condition)))
            self._expect("then")
            arguments.append(self._or())
        if not arguments:
            self._fail("expected WHEN")
        arguments.append(self._or() if self._takes("else") else Literal(None))
        self._expect("end")
        return Call("case", tuple(arguments))

    def _call(self, name: str, token: _Token) -> Node:
        if name not in FUNCTIONS:
            self._fail(f"a condition can call only {', '.join(sorted(FUNCTIONS))}", token)
        arguments = self._arguments()
        least, most = FUNCTIONS[name]
        if len(arguments) < least or (most is not None and len(arguments) > most):
            count = least if most == least else f"{least} or more" if most is None else f"{least} to {most}"
            self._fail(f"the function needs {count} arguments", token)
        if name == "isnotnull":
            return Call("not", (Call("is null", arguments),))
        if name == "if":
            return Call("case", arguments)
        return Call(_ALIASES.get(name, name), arguments)

    def _arguments(self) -> tuple[Node, ...]:
        self._expect_sign("(")
        arguments = [self._or()]
        while self._takes_sign(","):
            arguments.append(self._or())
        self._expect_sign(")")
        return tuple(arguments)

    def _text(self) -> str:
        token = self._take()
        if self._peek().kind == "text":
            self._fail("expected an operator between two texts")
        quote = token.text[0]
        return _ESCAPE.sub(lambda found: _character(found, quote, token.place), token.text[1:-1])

    def _peek(self) -> _Token:
        return self._tokens[self._next]

    def _peek_word(self) -> str:
        token = self._peek()
        return token.text.lower() if token.kind == "word" else ""

    def _take(self) -> _Token:
        token = self._peek()
        self._next = min(self._next + 1, len(self._tokens) - 1)
        return token

    def _takes(self, word: str) -> bool:
        if self._peek_word() != word:
            return False
        self._take()
        return True

    def _takes_sign(self, sign: str) -> bool:
        if self._peek()[:2] != ("sign", sign):
            return False
        self._take()
        return True

    def _expect(self, word: str) -> None:
        if not self._takes(word):
            self._fail(f"expected {word.upper()}")

    def _expect_sign(self, sign: str) -> None:
        if not self._takes_sign(sign):
            self._fail(f"expected {sign!r}")

    def _fail(self, message: str, token: _Token | None = None) -> NoReturn:
        raise ConditionSyntaxError(f"character {(token or self._peek()).place}: {message}")


def _balanced(word: str, operands: list[Node]) -> Node:
    """Return the operands of AND or OR as a tree of little depth, which evaluates them in their order."""
    if len(operands) == 1:
        return operands[0]
    middle = len(operands) // 2
    return Call(word, (_balanced(word, operands[:middle]), _balanced(word, operands[middle:])))


def _tokens(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    place = 0
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise ConditionSyntaxError(f"character {place + 1}: no part of the SQL that a delivery can evaluate")
        kind = match.lastgroup or ""
        if kind != "space":
            name = match[kind].replace("``", "`") if kind == "quoted" else match[kind]
            tokens.append(_Token(kind, name, place + 1))
        place = match.end()
    return [*tokens, _Token("end", "", len(text) + 1)]


def _number(text: str) -> int | Decimal | float:
    """Return a number as Spark reads it: with an exponent it is a double, with a point a decimal."""
    if "e" in text or "E" in text:
        return float(text)
    return Decimal(text) if "." in text else int(text)


def _character(match: re.Match[str], quote: str, place: int) -> str:
    """Return the characters of an escape sequence; place: of the text that has it."""
    short, long, octal, other, doubled = match.groups()
    if doubled is not None:
        return quote if doubled[0] == quote else doubled
    if other is not None:
        return _ESCAPES.get(other, other)
    if octal is not None:
        return chr(int(octal, 8))
    code = int(short or long, 16)
    if code > _LARGEST_CODE_POINT or code in _SURROGATES:
        raise ConditionSyntaxError(f"character {place}: an escape sequence of the text is no character")
    return chr(code)
