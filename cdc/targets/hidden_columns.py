"""Hidden columns: checks that no rename at the source shows a value that a rule of a sink or delivery hides.

A rule names columns and tables, but values belong to column ids. After two columns exchanged their names, or a column
was renamed and another one got its name, the names of a rule mean other values than before. Each version of a table
therefore knows the names that its columns had earlier (`TableSchema.former_names`), and the check compares what the
rule does with the present name of a column and with each former one. If it hid more under a former name, the table
stops, before any of its rows is written. A table that was renamed is checked in the same way against the rule of its
former topic.

The log keeps every version of a table, so the check gives the same result after a restart, in a replay, for a new sink
and without a catalog. `shown` of a transform names the pairs of a present and a former name that a person has accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Self

from cdc.config import SearchRule, SearchSettings, SinkRule, TableSettings, Transform, rule_of
from cdc.config.deliveries import DeliveryRule, DeliverySettings
from cdc.config.delta_sink import settings_with_rule
from cdc.config.search_sink import search_settings
from cdc.config.sink_rules import ColumnLists, RuleOfTables
from cdc.config.sinks import DefinedSink
from cdc.config.sql_expression import named_in
from cdc.config.transform import KEEP_LAST, REDACT, SHA256
from cdc.errors import HiddenColumnRenamed
from cdc.table import Column, TableSchema, matches

IN_DELIVERY: Final = (
    "write the column under its present name into 'drop', 'mask' or 'shown' of a rule that matches the table, then "
    "restart the process of the delivery"
)
"""Remedy if a delivery would show a hidden column."""
RulesOfTopic = Callable[[str], "ColumnRules"]
"""Function that returns the column rules of a topic in one sink or delivery."""
Strength = tuple[int, int]
"""How much of a column's values a rule hides; the greater one hides more."""
_CLEAR: Final[Strength] = (0, 0)
_OMITTED: Final[Strength] = (4, 0)
_MASKS: Final = {KEEP_LAST: 1, SHA256: 2, REDACT: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnRules:
    """What the rule of one table does with columns, by their names at the source."""

    lists: tuple[frozenset[str], ...] = ()
    """Lists of columns, such as `column_list` and `fields`; a column that one of the lists omits is omitted."""
    omitted: frozenset[str] = frozenset()
    masks: Mapping[str, str] = field(default_factory=dict)
    shown: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Present name → former names whose values may be shown."""
    filters: frozenset[str] = frozenset()
    """Lower-case names of the columns that a condition on rows reads."""
    python: str | None = None
    """Function that may hide any column, by its name."""

    @classmethod
    def of_transform(cls, transform: Transform | None) -> Self:
        """Return what a transform does with columns."""
        if transform is None:
            return cls()
        # the condition is over the columns of the target
        renamed = {new.casefold(): old.casefold() for old, new in transform.rename.items()}
        return cls(
            omitted=frozenset(transform.drop),
            masks=transform.mask,
            shown=transform.shown,
            filters=frozenset(renamed.get(name, name) for name in _names_in(transform.where)),
            python=transform.python,
        )

    @classmethod
    def of_sink(cls, settings: ColumnLists, rule: RuleOfTables | None) -> Self:
        """Return what a sink does with the columns of a table. settings: those of the sink, overridden by the rule"""
        own = cls.of_transform(None if rule is None else rule.transform)
        return replace(
            own,
            lists=tuple(frozenset(names) for names in settings.selecting_lists if names),
            omitted=own.omitted | frozenset(settings.except_column_list),
        )

    @classmethod
    def of_delivery(cls, rule: DeliveryRule | None) -> Self:
        """Return what a delivery does with the columns of a table."""
        if rule is None:
            return cls()
        return replace(cls.of_transform(rule.transform), filters=frozenset(_names_in(rule.when)))

    def strength(self, name: str) -> Strength:
        """Return how much the rule hides of a column that it names; columns that a list omits do not count."""
        if name in self.omitted:
            return _OMITTED
        if name not in self.masks:
            return _CLEAR
        kind, _, length = self.masks[name].partition(":")
        return _MASKS[kind], -int(length or 0)

    def is_listed(self, name: str) -> bool:
        """Return whether every list of columns has the name."""
        return all(name in names for names in self.lists)

    def omits(self, name: str) -> bool:
        """Return whether the rule omits the column."""
        return not self.is_listed(name) or name in self.omitted


def rules_of_sink(sink: DefinedSink) -> RulesOfTopic:
    """Return the column rules of a sink of a definition."""
    return lambda topic: ColumnRules.of_sink(sink.settings(topic), sink.rule(topic))


def table_rules(settings: TableSettings, rules: Sequence[SinkRule]) -> RulesOfTopic:
    """Return the column rules of a Delta sink. settings: those of the sink as a whole"""

    def of(topic: str) -> ColumnRules:
        rule = rule_of(topic, rules)
        return ColumnRules.of_sink(settings_with_rule(settings, rule), rule)

    return of


def document_rules(settings: SearchSettings, rules: Sequence[SearchRule]) -> RulesOfTopic:
    """Return the column rules of a search sink. settings: those of the sink as a whole"""
    return lambda topic: ColumnRules.of_sink(search_settings(topic, settings, rules), rule_of(topic, rules))


def event_rules(settings: DeliverySettings) -> RulesOfTopic:
    """Return the column rules of a delivery."""
    return lambda topic: ColumnRules.of_delivery(
        next((rule for rule in settings.rules if matches(topic, (rule.match,))), None)
    )


def check_hidden(schema: TableSchema, rules_of: RulesOfTopic, remedy: str | None = None) -> None:
    """Raise HiddenColumnRenamed if the rule of a table shows values that it hid under a former name.

    remedy: another one than that for a sink
    """
    if not schema.former_names and not schema.former_topics:
        return
    rules = rules_of(schema.topic)
    for column in schema.sent:
        if column.key is None and rules.omits(column.name):
            continue
        former = [name for number, name in schema.former_names if number == column.id]
        for name in former:
            why = _exposure(schema, column, name, rules)
            if why is not None and name not in rules.shown.get(column.name, ()):
                raise HiddenColumnRenamed(
                    f"column {column.name!r} of table {schema.topic!r} had the name {name!r}, {why}", remedy=remedy
                )
        for topic in schema.former_topics:
            if (hidden := _hidden_by_topic(schema, column, topic, rules_of)) is not None:
                raise HiddenColumnRenamed(
                    f"table {schema.topic!r} had the name {topic!r}, whose rule hides column {hidden!r}, "
                    f"and its present rule shows column {column.name!r}",
                    remedy=remedy,
                )


def with_moved_names(view: TableSchema, inputs: Iterable[TableSchema]) -> TableSchema:
    """Return the table of a view; if a name of an input belongs to another column now, with former names.

    SQL reads columns by their names, so each column of the view may then have the values of each other one.
    """
    if not any(map(_has_moved_name, inputs)):
        return view
    names = {(column.id, other.name) for column in view.columns for other in view.columns if other is not column}
    return replace(view, former_names=tuple(sorted(names)))


def _has_moved_name(schema: TableSchema) -> bool:
    """Return True if a column has a name that another column had before, and had another name itself."""
    renamed = {number for number, _ in schema.former_names}
    return any(
        column.id in renamed and column.name == name and column.id != number
        for column in schema.columns
        for number, name in schema.former_names
    )


def newly_hidden(before: TableSchema, now: TableSchema, rules_of: RulesOfTopic) -> str | None:
    """Return the name of a column that the rule hides more in a version of a table than in an earlier one."""
    earlier, rules, known = rules_of(before.topic), rules_of(now.topic), {c.id: c.name for c in before.columns}
    for column in now.sent:
        was = known.get(column.id, column.name)
        stays_visible = column.key is not None or not rules.omits(column.name)
        if stays_visible and not earlier.omits(was) and earlier.strength(was) < rules.strength(column.name):
            return column.name
    return None


def _exposure(schema: TableSchema, column: Column, former: str, rules: ColumnRules) -> str | None:
    """Return why the rule may show values that it hid while the column had a former name; None if it does not."""
    if rules.strength(former) > rules.strength(column.name):
        return "which its rule hides"
    others = {number for number, name in schema.former_names if name == column.name and number != column.id}
    if others and not rules.is_listed(former):
        return "which its rule omits, and another column had the present name"
    if rules.python is not None:
        return "and the function of its rule can hide columns by name"
    if others & {other.id for other in schema.columns} and column.name.casefold() in rules.filters:
        return "and the condition of its rule reads the present name, which another column had"
    return None


def _hidden_by_topic(schema: TableSchema, column: Column, topic: str, rules_of: RulesOfTopic) -> str | None:
    """Return a name under which the rule of a former topic hid more of a column; None if there is no such name."""
    before, now = rules_of(topic), rules_of(schema.topic)
    if before == now:
        return None
    names = {column.name, *(name for number, name in schema.former_names if number == column.id)}
    for name in sorted(names.difference(now.shown.get(column.name, ()))):
        if before.omits(name) or before.strength(name) > now.strength(column.name):
            return name
    return None


def _names_in(condition: str | None) -> set[str]:
    """Return the names of columns that an expression reads, in lower case."""
    found = () if condition is None else named_in(condition)
    return {name.casefold() for _, name, is_called in found if not is_called}
