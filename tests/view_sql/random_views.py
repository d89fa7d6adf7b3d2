"""Random views over three small tables, with random states before and after some changes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random
from typing import Final

Row = tuple[int | None, ...]
COLUMNS: Final = {"shop.a": ("id", "b_id", "g", "x"), "shop.b": ("id", "c_id", "g", "x"), "shop.c": ("id", "g", "x")}
"""Columns of the tables; all are integers, and few values of each make many matches."""

JOINS: Final = ("JOIN", "LEFT JOIN", "LEFT OUTER JOIN", "RIGHT JOIN", "FULL JOIN", "LEFT SEMI JOIN", "LEFT ANTI JOIN")
SHAPES: Final = (*("table",) * 7, "query", "query", "union", "common", "joined")


@dataclass(frozen=True)
class Case:
    """A view with the rows of its tables at two cuts."""

    sql: str
    key: tuple[str, ...]
    before: dict[str, list[Row]]
    after: dict[str, list[Row]]

    @property
    def columns(self) -> dict[str, dict[str, str]]:
        """Topic → column → type in Spark."""
        return {topic: dict.fromkeys(names, "INT") for topic, names in COLUMNS.items()}

    def changed(self, topic: str) -> tuple[list[Row], list[Row]]:
        """The old and the new images of the rows that changed."""
        old, new = Counter(self.before[topic]), Counter(self.after[topic])
        return list((old - new).elements()), list((new - old).elements())


def random_case(random: Random, depth: int, joins: int = 3) -> Case:
    """A case whose view has at most so many subqueries inside each other, and so many joins in each FROM clause."""
    sql, key = _Sql(random, joins).view(depth)
    before = {topic: _rows(random, len(columns)) for topic, columns in COLUMNS.items()}
    return Case(sql, key, before, {topic: _changed(random, rows) for topic, rows in before.items()})


def random_view(random: Random, depth: int, joins: int = 2) -> tuple[str, tuple[str, ...]]:
    """The SQL and the key of a view that has no key twice and no NULL in it, if the column `id` has neither."""
    return _Sql(random, joins).unique_view(depth)


def _rows(random: Random, width: int) -> list[Row]:
    return [_row(random, width) for _ in range(random.choice((1, 2, 3, 4, 6)))]


def _row(random: Random, width: int) -> Row:
    return tuple(random.choice((None, 0, 1, 1, 1, 2, 2)) for _ in range(width))


def _changed(random: Random, rows: list[Row]) -> list[Row]:
    """Rows after some inserts, deletes and updates; often none."""
    found = list(rows)
    for _ in range(random.choice((0, 1, 1, 2))):
        width = len(rows[0]) if rows else 0
        action = random.choice(("insert", "delete", "update")) if found else "none"
        if action == "insert":
            found.append(_row(random, width))
        elif action == "delete":
            found.pop(random.randrange(len(found)))
        elif action == "update":
            number, column = random.randrange(len(found)), random.randrange(width)
            row = list(found[number])
            row[column] = random.choice((None, 0, 1, 2))
            found[number] = tuple(row)
    return found


@dataclass
class _Sql:
    random: Random
    joins: int
    common: list[str] = field(default_factory=list)
    """Common table expressions of the view."""
    aliases: Iterator[str] = field(default_factory=lambda: (f"t{number}" for number in range(100)))

    def view(self, depth: int) -> tuple[str, tuple[str, ...]]:
        number = self.random.choice((1, 1, 2))
        sql = self._union(number, depth) if self._one_in(6) else self._select(number, depth)
        with_ = f"WITH {', '.join(self.common)} " if self.common else ""
        return with_ + sql, tuple(f"k{one}" for one in range(number))

    def unique_view(self, depth: int) -> tuple[str, tuple[str, ...]]:
        number = self.random.choice((1, 1, 2))
        keys = tuple(f"k{one}" for one in range(number))
        shape = self.random.choice((self._groups, self._groups, self._distinct_keys, self._rows_of_a_table))
        if self._one_in(5):
            sql = f"{self._groups(number, depth, branch=0)} UNION ALL {self._groups(number, depth, branch=1)}"
            keys = ("branch", *keys)
        else:
            sql = shape(number, depth)
        with_ = f"WITH {', '.join(self.common)} " if self.common else ""
        return with_ + sql, keys

    def _groups(self, keys: int, depth: int, branch: int | None = None) -> str:
        chain, columns = self._chain(depth)
        where = f" WHERE {self._filter(columns)}" if self._one_in(2) else ""
        sql = self._grouped([f"coalesce({self._key(columns)}, 7)" for _ in range(keys)], chain + where, columns)
        if branch is None:
            return sql
        # the names and types of a union are those of its branches
        return f"SELECT {branch} AS branch, u.* FROM ({sql}) u"

    def _distinct_keys(self, keys: int, depth: int) -> str:
        chain, columns = self._chain(depth)
        where = f" WHERE {self._filter(columns)}" if self._one_in(2) else ""
        items = [f"coalesce({self._key(columns)}, 7) AS k{number}" for number in range(keys)]
        return f"SELECT DISTINCT {', '.join(items)} FROM {chain}{where}"

    def _rows_of_a_table(self, keys: int, depth: int) -> str:
        """Rows of one table, with columns of groups that it joins; it may be filtered by other tables."""
        topic, one, group = self.random.choice(list(COLUMNS)), next(self.aliases), next(self.aliases)
        columns = [f"{one}.{name}" for name in COLUMNS[topic]]
        text = f"{topic} {one}"
        if self._one_in(2):
            other, more = self._relation(depth)
            kind = self.random.choice(("LEFT SEMI JOIN", "LEFT ANTI JOIN"))
            text += f" {kind} {other} ON {self.random.choice(columns)} = {self.random.choice(more)}"
        chain, more = self._chain(depth - 1)
        inner = (
            f"SELECT {self.random.choice(more)} AS h, CAST(sum({self.random.choice(more)}) AS INT) AS s FROM {chain}"
        )
        text += f" {self.random.choice(('JOIN', 'LEFT JOIN'))} ({inner} GROUP BY 1) {group}"
        text += f" ON {group}.h = {self.random.choice(columns)}"
        items = [f"{one}.id AS k{number}" for number in range(keys)]
        items += [f"{self.random.choice(columns)} AS v0", f"{group}.s AS v1"]
        where = f" WHERE {self._filter(columns)}" if self._one_in(3) else ""
        return f"SELECT {', '.join(items)} FROM {text}{where}"

    def _union(self, keys: int, depth: int) -> str:
        return f"{self._select(keys, depth)} UNION ALL {self._select(keys, depth)}"

    def _select(self, keys: int, depth: int) -> str:
        """A SELECT with columns k0, k1 … and the values v0 and v1, which are columns of integers."""
        chain, columns = self._chain(depth)
        has_comma = self._one_in(8)
        condition = self._condition if has_comma else self._filter
        conditions = [condition(columns)] if self._one_in(2) else []
        if has_comma:
            other, more = self._chain(0)
            # a view with another outer join after a comma is only refreshed
            other = re.sub(r"(RIGHT|FULL)( OUTER)? JOIN", "LEFT JOIN", other)
            chain = f"{chain}, {other}"
            conditions.append(f"{self.random.choice(columns)} = {self.random.choice(more)}")
            columns += more
        chosen = [self._key(columns) for _ in range(keys)]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        if self._one_in(2):
            return self._grouped(chosen, chain + where, columns)
        distinct = "DISTINCT " if self._one_in(4) else ""
        items = [f"{text} AS k{number}" for number, text in enumerate(chosen)]
        items += [f"{self.random.choice(columns)} AS v{number}" for number in range(2)]
        return f"SELECT {distinct}{', '.join(items)} FROM {chain}{where}"

    def _grouped(self, keys: list[str], source: str, columns: list[str]) -> str:
        items = [f"{text} AS k{number}" for number, text in enumerate(keys)]
        one, two = self.random.choice(columns), self.random.choice(columns)
        aggregates = ("count(*)", f"count(DISTINCT {one})", f"sum({two})", f"max({one})")
        items += [f"CAST({self.random.choice(aggregates)} AS INT) AS v{number}" for number in range(2)]
        by = self.random.choice(("ALL", ", ".join(keys), ", ".join(str(number + 1) for number in range(len(keys)))))
        having = self.random.choice(
            ("", "", f" HAVING count(*) > {self.random.choice((1, 2))}", f" HAVING max({two}) = 1")
        )
        return f"SELECT {', '.join(items)} FROM {source} GROUP BY {by}{having}"

    def _chain(self, depth: int, least: int = 0) -> tuple[str, list[str]]:
        """Relations with the columns that they give."""
        text, columns = self._relation(depth)
        for _ in range(max(least, min(self.joins, self.random.choice((0, 1, 1, 2, 2, 3))))):
            right, more = self._relation(depth)
            tables = {one for one in (text, right) if one.startswith("shop.") and one.count(" ") == 1}
            kinds = (
                "JOIN",
                "LEFT JOIN",
                "LEFT JOIN",
                "RIGHT JOIN",
                "FULL JOIN",
                "FULL OUTER JOIN",
                "LEFT SEMI JOIN",
                "LEFT ANTI JOIN",
            )
            kind = self.random.choice(kinds)
            on = f"{self.random.choice(columns)} = {self.random.choice(more)}"
            if self._one_in(4):
                on += f" AND {self._condition(more if self._one_in(2) else columns)}"
            # all tables have this column
            is_using = {text, right} <= tables and self._one_in(3)
            text = f"{text} {kind} {right} USING (g)" if is_using else f"{text} {kind} {right} ON {on}"
            if "SEMI" not in kind and "ANTI" not in kind:
                columns = columns + more
        return text, columns

    def _relation(self, depth: int) -> tuple[str, list[str]]:
        alias, shape = (
            next(self.aliases),
            self.random.choice(("table",) * 7 + ("query", "query", "union", "common", "joined")),
        )
        if shape == "joined" and depth >= 0:
            text, columns = self._chain(-1, least=1)
            return f"({text})", columns
        if shape == "table" or depth <= 0:
            topic = self.random.choice(list(COLUMNS))
            return f"{topic} {alias}", [f"{alias}.{name}" for name in COLUMNS[topic]]
        keys = self.random.choice((1, 2))
        columns = [*(f"k{number}" for number in range(keys)), "v0", "v1"]
        query = self._union(keys, depth - 1) if shape == "union" else self._select(keys, depth - 1)
        if shape == "common":
            name, renamed = f"w{len(self.common)}", [f"c{number}" for number in range(len(columns))]
            self.common.append(f"{name}({', '.join(renamed)}) AS ({query})")
            return f"{name} AS {alias}", [f"{alias}.{column}" for column in renamed]
        return f"({query}) {alias}", [f"{alias}.{name}" for name in columns]

    def _key(self, columns: list[str]) -> str:
        column = self.random.choice(columns)
        return self.random.choice(
            (column, column, f"coalesce({column}, 7)", f"{column} + {self.random.choice(columns)}")
        )

    def _filter(self, columns: list[str]) -> str:
        """A condition of a WHERE clause: every join becomes one with the tables of subqueries."""
        if not self._one_in(4):
            return self._condition(columns)
        chain, more = self._chain(0)
        where = f" WHERE {self._filter(more)}" if self._one_in(3) else ""
        having = " GROUP BY 1 HAVING count(*) > 1" if self._one_in(4) else ""
        found = f"{self.random.choice(columns)} IN (SELECT {self.random.choice(more)} FROM {chain}{where}{having})"
        return found if self._one_in(2) else f"{self._condition(columns)} AND {found}"

    def _condition(self, columns: list[str]) -> str:
        column = self.random.choice(columns)
        tests: tuple[Callable[[], str], ...] = (
            lambda: f"{column} IS NULL",
            lambda: f"{column} IS NOT NULL",
            lambda: f"{column} > 0",
            lambda: f"coalesce({column}, 1) = 1",
            lambda: f"({column} IS NULL OR {self.random.choice(columns)} = 2)",
        )
        return self.random.choice(tests)()

    def _one_in(self, number: int) -> bool:
        return self.random.randrange(number) == 0
