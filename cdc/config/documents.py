"""Documents: a short form of views that nest rows of other tables in those of a root, and the SQL of each.

    documents:
      - name: shop.order_search
        root: shop.orders
        include:
          customer: {table: shop.customers, on: {id: customer_id}, fields: [id, name]}
          items: {table: shop.order_items, on: {order_id: id}, fields: [sku, quantity], order_by: [line]}

An include without `order_by` is one object, or NULL without a row. One with `order_by` is a list, empty without a row.

A single list is collected by the SELECT that joins all tables. Several lists would multiply each other's rows there,
and so would a list in a list; so each of them is collected in a subquery, and joined as one row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from cdc.config.field_types import Identifier, Model, invalid
from cdc.config.views import View, ViewOptions
from cdc.table import split_topic

_ROOT: Final = "root"
"""Alias of the table whose rows are the documents."""
_INDENT: Final = "\n  "


def _table(text: str) -> str:
    if not all(split_topic(text)):
        raise invalid("expected schema.table, for example shop.orders")
    return text


def _list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Table = Annotated[str, AfterValidator(_table)]
Columns = Annotated[tuple[Identifier, ...], BeforeValidator(_list), Field(min_length=1)]


class Include(Model):
    """Rows of another table inside a document or inside another include: one object, or a list."""

    table: Table
    """Topic of the table, or of another view."""
    on: Annotated[Mapping[Identifier, Identifier], Field(min_length=1)]
    """Columns that join it: column of this table → equal column of the table around it."""
    fields: Columns | None = None
    """Columns to show; default all."""
    order_by: Columns | None = None
    """Columns that order the rows of a list. Without it, at most one row may match, and it is shown as an object."""
    include: Mapping[Identifier, Include] = {}
    """Name of a field → rows of a further table in it."""

    @model_validator(mode="after")
    def _checked(self) -> Include:
        _check_names(self.fields, self.include)
        return self


class Document(ViewOptions):
    """A view with one row per row of a root table, which contains rows of other tables as objects and lists."""

    root: Table
    """Topic of the table whose rows are the documents, or of another view."""
    key: Columns = ("id",)
    """Columns of the root that identify a row; default `id`."""
    fields: Columns | None = None
    """Columns of the root to show; default all."""
    include: Mapping[Identifier, Include] = {}
    """Name of a column of the document → rows of another table in it."""

    @model_validator(mode="after")
    def _checked(self) -> Document:
        _check_names(self.fields, self.include)
        if self.fields is not None and not set(self.key) <= set(self.fields):
            raise invalid("'fields' must have all columns of the key")
        return self

    @property
    def view(self) -> View:
        """The view that the document defines."""
        options = {name: getattr(self, name) for name in ViewOptions.model_fields}
        return View.model_construct(key=self.key, sql=sql_of(self), **options)


def sql_of(document: Document) -> str:
    """Return the SQL of a document."""
    is_alone = _lists(document.include) == 1
    node = _Node(_ROOT, "", is_alone)
    columns = [*_fields(_ROOT, document.fields), *node.included(document.include)]
    sql = f"SELECT{_INDENT}{f',{_INDENT}'.join(columns)}\nFROM {_quoted_topic(document.root)} AS {_quoted(_ROOT)}"
    return "\n".join([sql, *node.joins, *(["GROUP BY ALL"] if is_alone else [])])


@dataclass(slots=True)
class _Node:
    """The joins of one SELECT: a table, with the rows that are included in its own."""

    alias: str
    prefix: str
    """Begins the aliases of the included tables."""
    is_alone: bool
    """Whether the only list of the document is collected in this SELECT."""
    joins: list[str] = field(default_factory=list)

    def included(self, includes: Mapping[str, Include]) -> Iterator[str]:
        """Yield the column of each include, and add its joins."""
        for name, include in includes.items():
            yield f"{self._column(f'{self.prefix}{name}', include)} AS {_quoted(name)}"

    def _column(self, alias: str, include: Include) -> str:
        if include.order_by is not None and not self.is_alone:
            return self._joined_list(alias, include)
        self._join(alias, _quoted_topic(include.table), {one: one for one in include.on}, include)
        element = self._object(alias, include)
        matched = f"{_quoted(alias)}.{_quoted(next(iter(include.on)))} IS NOT NULL"
        if include.order_by is None:
            return f"CASE WHEN {matched} THEN {element} END"
        return _ordered(alias, include.order_by, element, f" FILTER (WHERE {matched})")

    def _joined_list(self, alias: str, include: Include) -> str:
        inner = _Node(alias, f"{alias}__", is_alone=False)
        assert include.order_by is not None  # noqa: S101 - it is a list
        elements = _ordered(alias, include.order_by, inner._object(alias, include), "")
        keys = [f"{_quoted(alias)}.{_quoted(column)} AS {_quoted(f'on_{column}')}" for column in include.on]
        grouped = ", ".join(f"{_quoted(alias)}.{_quoted(column)}" for column in include.on)
        head = (
            f"SELECT {', '.join(keys)}, {elements} AS elements FROM {_quoted_topic(include.table)} AS {_quoted(alias)}"
        )
        rows = _INDENT.join(["(", *(line for part in (head, *inner.joins) for line in part.split("\n"))])
        rows += f"{_INDENT}GROUP BY {grouped}\n)"
        self._join(alias, rows, {column: f"on_{column}" for column in include.on}, include)
        return f"coalesce({_quoted(alias)}.elements, array())"

    def _join(self, alias: str, rows: str, columns: Mapping[str, str], include: Include) -> None:
        """columns: column of the included table → its name in the joined rows."""
        equal = [
            f"{_quoted(alias)}.{_quoted(columns[one])} = {_quoted(self.alias)}.{_quoted(other)}"
            for one, other in include.on.items()
        ]
        self.joins.append(f"LEFT JOIN {rows} AS {_quoted(alias)} ON {' AND '.join(equal)}")

    def _object(self, alias: str, include: Include) -> str:
        """Return the struct of a row of the included table, and add the joins of what it includes itself."""
        inner = _Node(alias, f"{alias}__", self.is_alone, self.joins)
        return f"struct({', '.join([*_fields(alias, include.fields), *inner.included(include.include)])})"


def _ordered(alias: str, order_by: tuple[str, ...], element: str, condition: str) -> str:
    """Return the elements of a list in their order; elements of equal order are in that of their fields."""
    order = [f"{_quoted(alias)}.{_quoted(column)} AS order_{number}" for number, column in enumerate(order_by)]
    collected = f"collect_list(struct({', '.join(order)}, {element} AS element)){condition}"
    return f"transform(sort_array({collected}), one -> one.element)"


def _fields(alias: str, fields: tuple[str, ...] | None) -> Iterator[str]:
    names = ["*"] if fields is None else map(_quoted, fields)
    return (f"{_quoted(alias)}.{name}" for name in names)


def _lists(includes: Mapping[str, Include]) -> int:
    """Return the number of lists in a document."""
    return sum((one.order_by is not None) + _lists(one.include) for one in includes.values())


def _check_names(fields: tuple[str, ...] | None, includes: Mapping[str, Include]) -> None:
    for name in includes:
        if fields is not None and name.casefold() in {one.casefold() for one in fields}:
            raise invalid("'fields' and 'include' have the same name {name}", name=repr(name))


def _quoted_topic(topic: str) -> str:
    return ".".join(map(_quoted, split_topic(topic)))


def _quoted(name: str) -> str:
    return f"`{name.replace('`', '``')}`"
