"""Conditions have exactly the result of Spark: generated expressions over generated rows, and the functions one by one.

`CDC_TEST_CONDITIONS` is the number of generated expressions.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any, Final

import pyarrow as pa
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from cdc.config.condition_syntax import Call, Literal, Reference, parse_condition
from cdc.delivery.condition_compiler import Compiler
from cdc.delivery.condition_values import MOST_DIGITS, TEXT, ConditionType, reader_of, type_of
from cdc.delivery.formats.table_changes import table_changes
from cdc.delivery.row_condition import RowCondition
from cdc.errors import TransformFailed
from cdc.table import Column, ReplicaIdentity, TableSchema
from tests.log.rows import row, table

CONDITIONS: Final = int(os.environ.get("CDC_TEST_CONDITIONS", "160"))
SEED: Final = int(os.environ.get("CDC_TEST_SEED", "7"))
AT_ONCE: Final = 40
"""Expressions in one query: the code that Spark generates for more takes longer to compile."""
DECIMAL, WIDE = ((10 << 16) | 2) + 4, ((MOST_DIGITS << 16) | 18) + 4
COLUMNS: Final = {
    "id": Column(id=1, name="id", type_oid=20, type_name="bigint", key=0),
    "small": Column(id=2, name="small", type_oid=21, type_name="smallint"),
    "n": Column(id=3, name="n", type_oid=23, type_name="integer"),
    "d": Column(id=4, name="d", type_oid=1700, type_name="numeric", typmod=DECIMAL),
    "w": Column(id=5, name="w", type_oid=1700, type_name="numeric", typmod=WIDE),
    "f": Column(id=6, name="f", type_oid=700, type_name="real"),
    "g": Column(id=7, name="g", type_oid=701, type_name="double precision"),
    "t": Column(id=8, name="t", type_oid=25, type_name="text"),
    "u": Column(id=9, name="u", type_oid=25, type_name="text"),
    "b": Column(id=10, name="b", type_oid=16, type_name="boolean"),
    "day": Column(id=11, name="day", type_oid=1082, type_name="date"),
    "at": Column(id=12, name="at", type_oid=1184, type_name="timestamp with time zone"),
    "loc": Column(id=13, name="loc", type_oid=1114, type_name="timestamp without time zone"),
}
SCHEMA: Final = TableSchema(
    relation=16384,
    oid=16384,
    schema="shop",
    name="orders",
    replica_identity=ReplicaIdentity.FULL,
    columns=tuple(COLUMNS.values()),
)
TEXTS: Final = (
    "",
    " ",
    "a",
    "ab",
    "A_1",
    "AB1",
    "a%b",
    "ab  ",
    "  ab",
    "ß",
    "Σίσυφος",
    "\U0001f600x",
    "a\\_b",
    "5",
    "é",
)
ARROW: Final[dict[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "text": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def arrow_type(value_type: ConditionType) -> pa.DataType:
    """The type of a column in Spark."""
    return ARROW.get(value_type.name) or pa.decimal128(value_type.precision or 0, value_type.scale)


class Generator:
    """Random rows and expressions over them."""

    def __init__(self, random: Random) -> None:
        self.random = random

    def value(self, name: str) -> str | None:
        """The text of Postgres of a value of a column, often at the edge of its type."""
        random = self.random
        if name != "id" and random.random() < 0.15:
            return None
        edge = {"small": 2**15, "n": 2**31, "id": 2**63}.get(name)
        if edge is not None:
            return str(random.choice((random.randint(-3, 3), -edge, edge - 1, random.randint(-edge, edge - 1))))
        return str(random.choice(_VALUES[name]))

    def condition(self, depth: int) -> str:
        """An expression that is true, false or unknown."""
        random = self.random
        if depth <= 0:
            return random.choice(("after.b", "before.b", self._comparison(0), "after.t IS NULL", "TRUE", "NULL"))
        kinds: tuple[Callable[[int], str], ...] = (
            self._comparison, self._comparison, self._comparison, self._connected, self._connected, self._negated,
            self._null, self._in, self._between, self._like, self._test, self._case,
        )  # fmt: skip
        return random.choice(kinds)(depth)

    def _comparison(self, depth: int) -> str:
        operator = self.random.choice(("=", "<>", "<", "<=", ">", ">=", "<=>", "==", "!=", "IS DISTINCT FROM"))
        left, right = self._pair(depth)
        return f"{left} {operator} {right}"

    def _connected(self, depth: int) -> str:
        operator = self.random.choice(("AND", "OR"))
        return f"({self.condition(depth - 1)} {operator} {self.condition(depth - 1)})"

    def _negated(self, depth: int) -> str:
        return f"{self.random.choice(('NOT', '!'))} ({self.condition(depth - 1)})"

    def _null(self, depth: int) -> str:
        test = self.random.choice(("IS NULL", "IS NOT NULL", "IS TRUE", "IS NOT FALSE"))
        return f"({self.condition(depth - 1)}) {test}"

    def _in(self, depth: int) -> str:
        left, first = self._pair(depth - 1)
        _, second = self._pair(depth - 1)
        return f"{left} {self.random.choice(('', 'NOT '))}IN ({first}, {self.random.choice((first, second, 'NULL'))})"

    def _between(self, depth: int) -> str:
        # no sums: Spark computes the value before the AND that may leave it out
        left, right = self._pair(min(depth, 0))
        return f"{left} {self.random.choice(('', 'NOT '))}BETWEEN {right} AND {right}"

    def _like(self, depth: int) -> str:
        patterns = ("'a%'", "'A\\\\_%'", "'%b%'", "'__'", "''", "'%'", "'A!_1' ESCAPE '!'", "'a\\%b'", '"_b"')
        return f"{self._text(depth - 1)} {self.random.choice(('', 'NOT '))}LIKE {self.random.choice(patterns)}"

    def _test(self, depth: int) -> str:
        name = self.random.choice(("startswith", "endswith", "contains", "isnan"))
        if name == "isnan":
            return f"isnan({self.random.choice(('after.f', 'after.g'))})"
        return f"{name}({self._text(depth - 1)}, {self._text(depth - 1)})"

    def _case(self, depth: int) -> str:
        pieces = [self.condition(depth - 1) for _ in range(3)]
        shape = self.random.choice(("CASE WHEN {} THEN {} ELSE {} END", "if({}, {}, {})", "coalesce({}, {}, {})"))
        return shape.format(*pieces)

    def _pair(self, depth: int) -> tuple[str, str]:
        """Two values that can usually be compared."""
        family = self.random.choice((self._integer, self._number, self._floating, self._text, None))
        if family is None:
            name = self.random.choice(("day", "at", "loc"))
            return f"after.{name}", self.random.choice((f"before.{name}", *_TIMES[name]))
        return family(depth), family(depth)

    def _integer(self, depth: int) -> str:
        random = self.random
        if depth > 0 and random.random() < 0.15:
            return f"({self._integer(depth - 1)} {random.choice('+-*')} {self._integer(depth - 1)})"
        if depth > 0 and random.random() < 0.2:
            return f"length({self._text(depth - 1)})"
        return random.choice(("after.n", "before.n", "after.small", "after.id", "0", "1", "-1", "2147483648", "1000"))

    def _number(self, _depth: int) -> str:
        return self.random.choice(
            ("after.d", "before.d", "after.n", "after.id", "after.w", "1.5", "-0.01", ".5", "9.99", "3", "NULL",
             "coalesce(after.d, 0)", "123456789012345678901234567890")
        )  # fmt: skip

    def _floating(self, _depth: int) -> str:
        return self.random.choice(
            ("after.f", "after.g", "before.g", "after.d", "after.n", "0.1", "1e0", "0.5", "16777217", "2e-1")
        )

    def _text(self, depth: int) -> str:
        random = self.random
        if depth <= 0 or random.random() < 0.4:
            return random.choice(
                ("after.t", "before.t", "after.u", "op", "'a'", "'ab'", "''", "'it''s'", "'\\u00e9'", "NULL")
            )
        inner = self._text(depth - 1)
        shapes = (
            "trim({})", "ltrim({})", "rtrim({})", "concat({}, after.u)", "({} || 'x')", "nullif({}, 'a')",
            "coalesce({}, after.u)", "substring({}, {}, {})", "substr({}, {})",
            "CASE {} WHEN 'a' THEN after.u ELSE 'b' END",
        )  # fmt: skip
        return random.choice(shapes).format(
            inner, *(random.choice(("0", "1", "-1", "2", "-3", "after.n")) for _ in "12")
        )


_VALUES: Final[dict[str, Sequence[str]]] = {
    "d": ("0.00", "1.50", "-0.01", "9.99", "99999999.99", "-99999999.99", "3.00"),
    "w": ("0.000000000000000000", "1.500000000000000000", "12345678901234567890.123456789012345678"),
    "f": ("0", "-0", "0.1", "0.5", "NaN", "Infinity", "-Infinity", "1.6777216e+07", "3"),
    "g": ("0", "-0", "0.1", "0.5", "NaN", "Infinity", "-Infinity", "1", "0.10000000149011612", "9007199254740993"),
    "t": TEXTS,
    "u": TEXTS,
    "b": ("t", "f"),
    "day": ("2024-01-01", "0001-01-01", "9999-12-31", "2023-12-31"),
    "at": (
        "2024-01-01 00:00:00+00",
        "0001-01-01 00:00:00+00",
        "9999-12-31 23:59:59.999999+00",
        "2024-01-01 10:00:00.5+00",
    ),
    "loc": ("2024-01-01 00:00:00", "0001-01-01 00:00:00", "9999-12-31 23:59:59.999999", "2024-01-01 10:00:00.000001"),
}
_TIMES: Final = {
    "day": ("'2024-01-01'", "date '2023-12-31'", "NULL"),
    "at": ("'2024-01-01'", "'2024-01-01 10:00:00.5'", "timestamp '2024-01-01 12:00:00+02:00'",
           "'2024-01-01T00:00:00Z'"),
    "loc": ("'2024-01-01'", "'2024-01-01 10:00:00.000001'", "timestamp_ntz '2024-01-01 00:00:00'"),
}  # fmt: skip


def evaluated(text: str, rows: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """Numbers of the rows for which the condition is true, and of those that fail."""
    found = RowCondition(text, SCHEMA).matches(table_changes(SCHEMA, "", table(*rows)))
    return found.kept.tolist(), found.failed.tolist()


def log_rows(generator: Generator, count: int) -> list[dict[str, Any]]:
    """Rows of the log."""
    made = []
    for number in range(count):
        images = [[(one.id, generator.value(name)) for name, one in COLUMNS.items()] for _ in range(2)]
        made.append(row(20, number, op=generator.random.choice("cud"), before=images[0], after=images[1]))
    return made


def frame_of(spark: SparkSession, rows: Sequence[dict[str, Any]]) -> DataFrame:
    """The rows as Spark sees them: `number`, `op` and the structs `before` and `after`."""
    arrays: dict[str, pa.Array] = {
        "number": pa.array(range(len(rows)), pa.int64()),
        "op": pa.array([one["op"] for one in rows]),
    }
    for side in ("before", "after"):
        columns = {}
        for name, column in COLUMNS.items():
            found = type_of(column)
            read = reader_of(found)
            texts = [dict(one[side])[column.id] for one in rows]
            values = [None if text is None else read(text) for text in texts]
            if found.bits is not None:
                values = [None if value is None else int(value) for value in values]
            columns[name] = pa.array(values, arrow_type(found))
        arrays[side] = pa.StructArray.from_arrays(list(columns.values()), list(columns))
    return spark.createDataFrame(pa.table(arrays)).cache()


def in_spark(frame: DataFrame, texts: Sequence[str], left_out: Sequence[int] = ()) -> list[list[int]]:
    """Numbers of the rows for which each condition is true."""
    rows = frame.filter(~frame.number.isin(*left_out)) if left_out else frame
    expressions = [f"({text}) AS c{place}" for place, text in enumerate(texts)]
    results = rows.selectExpr("number", *expressions).orderBy("number").toArrow().to_pydict()
    return [
        [number for number, found in zip(results["number"], results[f"c{place}"], strict=True) if found]
        for place in range(len(texts))
    ]


def test_generated_conditions_have_the_results_of_spark(spark: SparkSession) -> None:
    generator = Generator(Random(SEED))
    rows = log_rows(generator, 40)
    frame = frame_of(spark, rows)
    texts: list[str] = []
    refused = 0
    while len(texts) < CONDITIONS:
        text = generator.condition(3)
        try:
            RowCondition(text, SCHEMA)
        except TransformFailed:
            refused += 1
        else:
            texts.append(text)
    ours = {text: evaluated(text, rows) for text in texts}
    # Spark may compute a part of a condition for a row for which CASE leaves it out
    failing = [text for text, (_, failed) in ours.items() if failed]
    complete = [text for text in ours if text not in set(failing)]
    theirs = {text: in_spark(frame, [text], ours[text][1])[0] for text in failing}
    for first in range(0, len(complete), AT_ONCE):
        chosen = complete[first : first + AT_ONCE]
        theirs |= zip(chosen, in_spark(frame, chosen), strict=True)
    differences = [(text, kept, theirs[text]) for text, (kept, _) in ours.items() if kept != theirs[text]]
    print(f"{len(ours):,} conditions, {len(failing):,} with rows that fail; {refused:,} refused")

    assert differences == []
    assert refused < CONDITIONS


def test_a_row_that_fails_here_fails_in_spark(spark: SparkSession) -> None:
    rows = [row(20, 0, after=[(one.id, {"n": "2147483647", "id": "1"}.get(name)) for name, one in COLUMNS.items()],
                before=[(one.id, None) for one in COLUMNS.values()])]  # fmt: skip
    frame = frame_of(spark, rows)
    failing = ("after.n + 1 > 0", "after.n * after.n > 0", "-2 - after.n < 0", "coalesce(after.small, after.n) * 2 > 0")
    lazy = ("after.n < 0 AND after.n + 1 > 0", "after.n > 0 OR after.n * 2 > 0", "coalesce(after.n, after.n + 1) > 0")

    for text in failing:
        assert evaluated(text, rows) == ([], [0]), text
        with pytest.raises(PySparkException, match="OVERFLOW"):
            in_spark(frame, [text])
    for text in lazy:
        assert [evaluated(text, rows)[0]] == in_spark(frame, [text]), text


def test_a_padded_text_is_compared_as_in_spark(spark: SparkSession) -> None:
    columns = [("c", 5), ("e", 3)]
    schema = replace(
        SCHEMA,
        columns=tuple(
            Column(id=number, name=name, type_oid=1042, type_name="character", typmod=length + 4)
            for number, (name, length) in enumerate(columns)
        ),
    )
    pairs = [("ab", "ab"), ("", "a"), ("abc  ", "abc"), ("b", "a"), ("ab\x01", "ab"), (None, "a")]
    conditions = [
        f"after.c {operator} {other}"
        for operator in ("=", "<>", "<", ">=", "<=>")
        for other in ("'ab'", "'ab  '", "'abcdefg'", "''", "after.e")
    ]
    conditions += ["after.c in ('ab', 'x')", "after.c in ('ab  ', '')", "after.e not in ('a')"]
    rows = [
        row(20, number, after=[(0, c and c.ljust(5)), (1, e and e.ljust(3))]) for number, (c, e) in enumerate(pairs)
    ]
    spark.sql("DROP TABLE IF EXISTS padded_texts")
    spark.sql("CREATE TABLE padded_texts (number INT, c CHAR(5), e CHAR(3)) USING parquet")
    try:
        frame = spark.createDataFrame(
            [(number, *pair) for number, pair in enumerate(pairs)], "number INT, c STRING, e STRING"
        )
        frame.coalesce(1).write.insertInto("padded_texts")
        selected = [f"({text.replace('after.', '')}) AS c{place}" for place, text in enumerate(conditions)]
        results = spark.table("padded_texts").selectExpr("number", *selected).orderBy("number").toArrow().to_pydict()
    finally:
        spark.sql("DROP TABLE padded_texts")
    for place, text in enumerate(conditions):
        kept = RowCondition(text, schema).matches(table_changes(schema, "", table(*rows))).kept.tolist()
        assert kept == [number for number, found in enumerate(results[f"c{place}"]) if found], text


LITERALS: Final = (
    r"'it''s'",
    r"'a\nb'",
    r"'\\'",
    r"'\''",
    r"'\101'",
    r"'\u00e9\U0001F600'",
    r'"a\"b"',
    r"'\%\_'",
    r"'\q\0'",
    r"'\Z'",
    "\"it''s\"",
    "'a\"\"b'",
    '"a""b"',
    "'\n'",
    r"'\377'",
    r"'\08'",
    r"'\u12'",
)


def test_a_text_in_the_condition_is_that_of_spark(spark: SparkSession) -> None:
    texts = spark.sql(f"SELECT {', '.join(LITERALS)}").collect()[0]
    nodes = [parse_condition(f"after.t = {literal}") for literal in LITERALS]

    assert [node.arguments[1] for node in nodes if isinstance(node, Call)] == [Literal(text) for text in texts]


CHARACTERS: Final = [chr(code) for code in (*range(1, 0xD800), *range(0xE000, 0x10000))]


@pytest.mark.parametrize("name", ["trim", "ltrim", "rtrim", "length"])
def test_a_function_of_one_text_has_the_result_of_spark_for_every_character(spark: SparkSession, name: str) -> None:
    texts = [f"a{character}" for character in CHARACTERS] + [f"{character}a" for character in CHARACTERS]
    frame = spark.createDataFrame(pa.table({"t": texts}))
    theirs = [one[0] for one in frame.selectExpr(f"{name}(t)").collect()]
    compiler = Compiler({Reference("after", "t"): (0, TEXT)})
    compiled = compiler.compiled(parse_condition(f"{name}(after.t)"))
    ours = [compiled.evaluate((text,)) for text in texts]

    assert {text: (own, other) for text, own, other in zip(texts, ours, theirs, strict=True) if own != other} == {}
