"""Random SELECTs over three tables whose joins have conditions of every kind, with rows before and after some changes.

A condition may compare the joined table with an earlier one, two earlier tables, or one table only; it may be NULL; it
has OR, NOT, CASE and comparisons for which NULL equals NULL. Tables are read more than once, and joined by every kind
of join. Every view has a key that is unique and never NULL, because `id` is the primary key of each table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final, NamedTuple

Row = tuple[Any, ...]
COLUMNS: Final = {
    "shop.a": ("id", "g", "x", "f", "t"),
    "shop.b": ("id", "g", "y", "f", "t"),
    "shop.c": ("id", "x", "y", "t"),
}
"""Topic → columns of the table; `f` is a double and `t` a text, all others are integers."""
TYPES: Final = {"f": "DOUBLE", "t": "STRING"}
"""Column → type in Spark, if it is not INT."""
_VALUES: Final[dict[str, tuple[Any, ...]]] = {
    "INT": (None, 0, 1, 1, 2, 3),
    "DOUBLE": (None, 0.0, -0.0, 1.0, float("nan")),
    "STRING": (None, "p", "q"),
}
_JOINS: Final = (
    "JOIN",
    "INNER JOIN",
    "LEFT JOIN",
    "LEFT JOIN",
    "LEFT OUTER JOIN",
    "LEFT SEMI JOIN",
    "LEFT SEMI JOIN",
    "LEFT ANTI JOIN",
    "LEFT ANTI JOIN",
    "CROSS JOIN",
    ",",
)
_OUTER: Final = ("RIGHT JOIN", "FULL JOIN")
_IDS: Final = 8


class _Column(NamedTuple):
    alias: str
    name: str

    @property
    def sql(self) -> str:
        return f"{self.alias}.{self.name}"

    @property
    def type(self) -> str:
        return TYPES.get(self.name, "INT")


@dataclass(frozen=True)
class JoinCase:
    """A view with the rows of its tables at two cuts."""

    sql: str
    key: tuple[str, ...]
    before: dict[str, list[Row]]
    after: dict[str, list[Row]]

    @property
    def columns(self) -> dict[str, dict[str, str]]:
        """Topic → column → type in Spark."""
        return {topic: {name: TYPES.get(name, "INT") for name in names} for topic, names in COLUMNS.items()}

    def changed(self, topic: str) -> tuple[list[Row], list[Row]]:
        """The old and the new images of the rows that changed."""
        old, new = ({_bits(row): row for row in rows[topic]} for rows in (self.before, self.after))
        return [old[bits] for bits in old.keys() - new.keys()], [new[bits] for bits in new.keys() - old.keys()]


def random_join_case(random: Random, *, has_outer: bool = True) -> JoinCase:
    """A view with the rows of its tables. has_outer: whether there may be RIGHT and FULL JOIN."""
    sql, key = random_join_view(random, has_outer=has_outer)
    before = {topic: [_row(random, topic, number) for number in _ids(random)] for topic in COLUMNS}
    after = {topic: list(rows) for topic, rows in before.items()}
    for _ in range(random.choice((1, 2, 3, 4))):
        _change(random, after)
    return JoinCase(sql, key, before, after)


def random_join_view(random: Random, *, has_outer: bool = True, tables: int = 4) -> tuple[str, tuple[str, ...]]:
    """The SQL and the key of a view. has_outer: whether there may be RIGHT and FULL JOIN. tables: how many at most."""
    return _Joins(random, has_outer, tables).view()


def random_value(random: Random, column: str) -> Any:
    """A value of a column that is not `id`."""
    return random.choice(_VALUES[TYPES.get(column, "INT")])


def comparable(rows: Sequence[Row]) -> Counter[Row]:
    """Row → its number; NaN equals NaN, and -0 is not 0."""
    return Counter(map(_bits, rows))


def _bits(row: Row) -> Row:
    return tuple(repr(value) if isinstance(value, float) else value for value in row)


def _ids(random: Random) -> list[int]:
    return sorted(random.sample(range(_IDS), random.randrange(3, _IDS + 1)))


def _row(random: Random, topic: str, number: int) -> Row:
    return (number, *(random_value(random, name) for name in COLUMNS[topic][1:]))


def _change(random: Random, tables: dict[str, list[Row]]) -> None:
    """Insert, delete or update one row of one table."""
    topic = random.choice(list(tables))
    rows = {row[0]: row for row in tables[topic]}
    number = random.randrange(_IDS)
    if number in rows and random.random() < 0.3:
        del rows[number]
    elif number in rows:
        place = random.randrange(1, len(COLUMNS[topic]))
        values = list(rows[number])
        values[place] = random_value(random, COLUMNS[topic][place])
        rows[number] = tuple(values)
    else:
        rows[number] = _row(random, topic, number)
    tables[topic] = list(rows.values())


@dataclass
class _Joins:
    random: Random
    has_outer: bool
    tables: int
    text: str = ""
    """The FROM clause so far."""
    columns: list[_Column] = field(default_factory=list)
    """Columns that WHERE and the select list may name."""
    chain: list[_Column] = field(default_factory=list)
    """Columns that the condition of the next join may name: those after the last comma."""
    conditions: list[str] = field(default_factory=list)
    """Conditions of WHERE."""
    is_outer: bool = False
    """Whether the first table may show NULLs."""

    def view(self) -> tuple[str, tuple[str, ...]]:
        topic = self.random.choice(list(COLUMNS))
        self.text, self.columns = f"{topic} t0", _columns(topic, "t0")
        self.chain = list(self.columns)
        for number in range(1, min(self.tables, self.random.choice((2, 3, 3, 4)))):
            self._join(self.random.choice(list(COLUMNS)), f"t{number}")
        for _ in range(self.random.choice((0, 0, 0, 1))):
            self.conditions.append(self._conjunct(self.columns))
        return self.random.choice((self._rows, self._groups, self._groups, self._distinct))()

    def _join(self, topic: str, alias: str) -> None:
        has_comma = len(self.chain) < len(self.columns)
        kinds = (*_JOINS, *(_OUTER if self.has_outer and not has_comma and self._one_in(3) else ()))
        kind, added = self.random.choice(kinds), _columns(topic, alias)
        if kind in {",", "CROSS JOIN"}:
            self.text += f"{kind} {topic} {alias}" if kind == "," else f" {kind} {topic} {alias}"
            self.conditions.append(self._equality(added, self.columns, self._one_in(10)))
            self.chain = added if kind == "," else self.chain + added
        else:
            self.text += f" {kind} {topic} {alias} {self._join_condition(added)}"
            self.is_outer |= kind in _OUTER
        if "SEMI" not in kind and "ANTI" not in kind:
            self.columns = self.columns + added
            self.chain = self.chain if kind in {",", "CROSS JOIN"} else self.chain + added

    def _join_condition(self, added: list[_Column]) -> str:
        # Spark joins relations with a comma first, and USING takes the first column of a name; DuckDB does neither
        names = [column.name for column in self.columns]
        usable = {column.name for column in self.chain if names.count(column.name) == 1}
        shared = [column.name for column in added if column.name in usable]
        if shared and self._one_in(6):
            return f"USING ({self.random.choice(shared)})"
        parts = [self._equality(added, self.chain, self._one_in(6))]
        for _ in range(self.random.choice((0, 0, 1, 1, 1, 2))):
            columns = self.random.choice((self.chain, self.chain, self.chain, added, self.chain + added))
            parts.append(self._conjunct(columns))
        self.random.shuffle(parts)
        return f"ON {' AND '.join(parts)}"

    def _conjunct(self, columns: list[_Column]) -> str:
        """A condition that others may follow with AND; often an equality of two columns."""
        return self._equality(columns, columns, self._one_in(4)) if self._one_in(2) else self._condition(columns, 2)

    def _equality(self, columns: list[_Column], others: list[_Column], is_other: bool) -> str:
        """An equality of two columns; is_other: not one that finds rows by their values."""
        one = self.random.choice([column for column in columns if any(column.type == other.type for other in others)])
        usable = [column for column in others if column.type == one.type]
        other = self.random.choice([column for column in usable if column.alias != one.alias] or usable)
        left, right = (one.sql, other.sql) if self._one_in(2) else (other.sql, one.sql)
        if is_other:
            return f"{left} + 0 = {right}" if one.type == "INT" and self._one_in(2) else f"{left} <=> {right}"
        return f"{left} IN ({right})" if self._one_in(8) else f"{left} = {right}"

    def _condition(self, columns: list[_Column], depth: int) -> str:
        shape = self.random.choice(("NOT", "OR", "AND", "CASE", *("atom",) * 3)) if depth else "atom"
        parts = [self._condition(columns, depth - 1) for _ in range(3)] if shape != "atom" else []
        if shape == "atom":
            return self._atom(columns)
        if shape == "NOT":
            return f"NOT ({parts[0]})"
        if shape == "CASE":
            return f"CASE WHEN {parts[0]} THEN {parts[1]} ELSE {parts[2]} END"
        return f"({parts[0]} {shape} {parts[1]})"

    def _atom(self, columns: list[_Column]) -> str:
        column = self.random.choice(columns)
        other = self.random.choice([one for one in columns if one.type == column.type])
        name, two = column.sql, f"{column.sql} {{}} {other.sql}"
        tests = [f"{name} IS NULL", f"{name} IS NOT NULL"]
        tests += [two.format(operator) for operator in ("=", "<=>", "<>", "IS DISTINCT FROM")]
        if column.type == "INT":
            tests += [f"{name} {test}" for test in ("= 1", "<> 1", "> 0", "IN (0, 1)", "NOT IN (1, 2)")]
            tests += [f"{name} BETWEEN 0 AND 1", f"coalesce({name}, 1) = 1", f"{name} IN (1, NULL)"]
        return self.random.choice(tests)

    def _rows(self) -> tuple[str, tuple[str, ...]]:
        """Rows of the joined tables, each with the ids of all tables."""
        ids = [column.sql for column in self.columns if column.name == "id"]
        plain = 0 if self.is_outer else 1
        items = [*ids[:plain], *(f"coalesce({name}, -1)" for name in ids[plain:])]
        keys = [f"k{number}" for number in range(len(items))]
        items = [f"{item} AS {key}" for item, key in zip(items, keys, strict=True)]
        items += [f"{self.random.choice(self.columns).sql} AS v{number}" for number in range(2)]
        return f"SELECT {', '.join(items)} FROM {self.text}{self._where()}", tuple(keys)

    def _groups(self) -> tuple[str, tuple[str, ...]]:
        """Groups of one or two columns; the sum of the ids shows which rows are in a group."""
        by = self._key_columns()
        ids = [column.sql for column in self.columns if column.name == "id"]
        digits = " + ".join(f"coalesce({name}, 7) * {10**number}" for number, name in enumerate(ids))
        whole = self.random.choice([column for column in self.columns if column.type == "INT"]).sql
        items = [f"{column.sql} AS k{number}" for number, column in enumerate(by)]
        items += [f"CAST(sum({digits}) AS INT) AS v0", f"max({whole}) AS v1", "count(*) AS v2"]
        grouped = f"GROUP BY {', '.join(column.sql for column in by)}"
        having = self.random.choice(("", "", f" HAVING count({whole}) > 1"))
        sql = f"SELECT {', '.join(items)} FROM {self.text}{self._where(by)} {grouped}{having}"
        return sql, tuple(f"k{number}" for number in range(len(by)))

    def _distinct(self) -> tuple[str, tuple[str, ...]]:
        by = self._key_columns()
        items = [f"{column.sql} AS k{number}" for number, column in enumerate(by)]
        sql = f"SELECT DISTINCT {', '.join(items)} FROM {self.text}{self._where(by)}"
        return sql, tuple(f"k{number}" for number in range(len(by)))

    def _key_columns(self) -> list[_Column]:
        usable = [column for column in self.columns if column.type != "DOUBLE"]
        return self.random.sample(usable, self.random.choice((1, 1, 1, 2)))

    def _where(self, never_null: Sequence[_Column] = ()) -> str:
        conditions = [*self.conditions, *(f"{column.sql} IS NOT NULL" for column in never_null)]
        self.random.shuffle(conditions)
        return f" WHERE {' AND '.join(conditions)}" if conditions else ""

    def _one_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0


def _columns(topic: str, alias: str) -> list[_Column]:
    return [_Column(alias, name) for name in COLUMNS[topic]]
