"""Editing of a definition file: adds tables to its rules or removes them, and changes no other character.

The edit inserts or removes text at the offsets that the YAML parser reports for lists. It does not print the document:
ruamel's round trip, without any edit, changes 12 lines of `config/shop.yaml` (`null` and spaces before comments), and
the indentation of lists. The new text is validated: its rules must capture all added tables and none of the removed
ones. If they do not, for example because of anchors or an unknown layout, nothing is written.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError
from ruamel.yaml.nodes import MappingNode, Node, SequenceNode

from cdc import atomic_file
from cdc.config.definition import Definition
from cdc.config.definition_file import check_definition, load_definition
from cdc.errors import ConfigError
from cdc.table import exact_glob, matches

_GLOB: Final = re.compile(r"[^\x00-\x1f\x7f]+\.[^\x00-\x1f\x7f]+\Z")
_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z0-9_]+(?:\.?\*)?\Z")
"""Table names that YAML reads as text without quotes."""
_BOM: Final = "\ufeff"


@dataclass(frozen=True, slots=True)
class YamlEdit:
    """A change of a definition file: its text before and after."""

    path: Path
    before: str
    after: str
    done: tuple[str, ...]
    """One description per change; empty if nothing has to change."""
    by_hand: tuple[str, ...]
    """Instructions for making the same changes by hand, one per change."""
    definition: Definition
    """Definition that the new text contains."""

    @property
    def changes(self) -> bool:
        """True if the new text differs from the old one."""
        return self.before != self.after

    @property
    def diff(self) -> str:
        """The change in the format of `diff -u`; an empty text if nothing changes."""
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        lines = unified_diff(old, new, str(self.path), f"{self.path} (new)")
        return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def add_tables(path: Path, tables: Sequence[str]) -> YamlEdit:
    """Return an edit of the rules that makes them capture the tables, given as globs of `schema.table`.

    Raises ConfigError if no edit can do this.
    """
    return _edited(path, tables, _add)


def remove_tables(path: Path, tables: Sequence[str]) -> YamlEdit:
    """Return an edit of the rules that makes them capture none of the tables.

    Raises ConfigError if no edit can do this.
    """
    return _edited(path, tables, _remove)


def write_edit(edit: YamlEdit) -> None:
    """Replace the file by the new text atomically, and keep its mode and owner.

    Raises ConfigError if the file has changed since it was read, or if it cannot be written.
    """
    path = edit.path.resolve()
    try:
        if path.read_bytes() != edit.before.encode():
            raise ConfigError(f"another process has changed definition {edit.path}", remedy="run the command again")
        status = path.stat()
        atomic_file.replace(path, edit.after.encode())
        path.chmod(stat.S_IMODE(status.st_mode))
        if (path.stat().st_uid, path.stat().st_gid) != (status.st_uid, status.st_gid):
            os.chown(path, status.st_uid, status.st_gid)
    except OSError as error:
        raise ConfigError(
            f"definition {edit.path} cannot be written: {(error.strerror or 'unknown reason').lower()}",
            remedy=f"edit the file by hand: {'; '.join(edit.by_hand)}; a running reader applies the change "
            "within 30 seconds",
        ) from error


@dataclass(frozen=True, slots=True)
class _Step:
    """The definition's text after the change for one table, and the description of this change."""

    text: str
    done: str | None = None
    by_hand: str | None = None


def _edited(path: Path, tables: Sequence[str], change: Callable[[_Text, str], _Step]) -> YamlEdit:
    for table in tables:
        if not _GLOB.match(table):
            raise ConfigError(f"malformed table name {table!r}", remedy="write schema.table, or a glob such as shop.*")
    load_definition(path)  # an invalid definition is not edited
    content = path.read_bytes()
    before = text = content.decode()
    done: list[str] = []
    by_hand: list[str] = []
    for table in tables:
        step = change(_Text(path, text), table)
        text = step.text
        done += [step.done] if step.done else []
        by_hand += [step.by_hand] if step.by_hand else []
    definition = check_definition(path, content=text.encode()).definition
    if definition is None or not _means(definition, load_definition(path), tables, wanted=change is _add):
        raise ConfigError(
            f"cdc cannot safely edit definition {path}, because of its YAML layout",
            remedy=f"edit the file by hand: {'; '.join(by_hand)}",
        )
    return YamlEdit(path, before, text, tuple(done), tuple(by_hand), definition)


def _means(now: Definition, before: Definition, tables: Sequence[str], *, wanted: bool) -> bool:
    """Return True if the edited definition has the intended effect and no other.

    If `wanted` is True, the rules of `now` must capture all `tables`; otherwise they must capture none of them.
    Everything in `now` except the rules must be as in `before`.
    """
    if now.with_rules_of(before) != before:
        return False
    captured = [_covers(now.patterns, table) and not _covers(now.excludes, table) for table in tables]
    return captured == [wanted] * len(tables)


def _add(text: _Text, table: str) -> _Step:
    for place, said in text.named_exclusions(table):
        shorter = text.without(place, said)
        rest = _add(_Text(text.path, shorter), table)
        return _Step(rest.text, f"no longer excludes {table}", f"remove {table} from 'exclude'")
    if excluding := next((glob for glob in text.definition.excludes if _covers([glob], table)), None):
        raise ConfigError(
            f"table {table!r} is excluded by {excluding!r}, which also excludes other tables",
            remedy=f"change 'exclude' in {text.path} by hand",
        )
    if _covers(text.definition.patterns, table):
        return _Step(text.text)
    by_hand = f"- match: {_written(table)}"
    return _Step(
        text.with_item(("tables",), "match", table), f"has a new rule for {table}", f"{by_hand} under 'tables'"
    )


def _remove(text: _Text, table: str) -> _Step:
    definition = text.definition
    rules = definition.tables
    own = [n for n, rule in enumerate(rules) if rule.match in {table, exact_glob(table)} and not rule.exclude]
    if own:
        if len(rules) == len(own):
            raise ConfigError(
                f"{table!r} is the only rule of the pipeline: a pipeline captures at least one table",
                remedy="stop the pipeline instead, or add another table first",
            )
        shorter = text.without(("tables",), own[0])
        rest = _remove(_Text(text.path, shorter), table)
        return _Step(rest.text, f"no longer has a rule for {table}", f"remove the rule for {table} from 'tables'")
    touched = any(_covers([rule.match], table) or _covers([table], rule.match) for rule in rules)
    if not touched or _covers(definition.excludes, table):
        return _Step(text.text)
    by_hand = f"- {_written(table)} under 'exclude'"
    return _Step(text.with_item(("exclude",), None, table), f"excludes {table}", by_hand)


class _Text:
    """The text of a definition with the parsed nodes of its rules."""

    def __init__(self, path: Path, text: str) -> None:
        self.path, self.text = path, text
        found = check_definition(path, content=text.encode()).definition
        try:
            self._root: Node | None = YAML(typ="safe", pure=True).compose(text.removeprefix(_BOM))
        except YAMLError:
            self._root = None
        if found is None or not isinstance(self._root, MappingNode) or self._root.flow_style:
            raise ConfigError(
                f"cdc cannot safely edit definition {path}, because of its YAML layout", remedy="edit the file by hand"
            )
        self.definition = found
        self._shift = len(text) - len(text.removeprefix(_BOM))

    def named_exclusions(self, table: str) -> list[tuple[tuple[str | int, ...], int]]:
        """Return (key of the list, index) for each exclusion that names exactly this table."""
        lists: list[tuple[tuple[str | int, ...], Sequence[str]]] = [(("exclude",), self.definition.exclude)]
        lists += [(("tables", n, "exclude"), rule.exclude) for n, rule in enumerate(self.definition.tables)]
        names = {table, exact_glob(table)}
        return [(key, n) for key, globs in lists for n, glob in enumerate(globs) if glob in names]

    def without(self, key: tuple[str | int, ...], number: int) -> str:
        """Return the text without item `number` of the list at `key`."""
        found = self._list(key)
        items = found.value
        if found.flow_style:
            if number + 1 < len(items):
                return self._spliced(items[number].start_mark.index, items[number + 1].start_mark.index, "")
            begin = items[number - 1].end_mark.index if number else items[number].start_mark.index
            return self._spliced(begin, items[number].end_mark.index, "")
        if len(items) == 1:
            return self._spliced(self._colon(key), _end(items[0]), " []")
        begin = self._line(self._dash(items[number]))
        return self._spliced(begin, self._next_line(_end(items[number])), "")

    def with_item(self, key: tuple[str | int, ...], name: str | None, value: str) -> str:
        """Return the text with an item appended to the list at `key`: `value`, or the mapping `name: value`."""
        item = _written(value) if name is None else f"{name}: {_written(value)}"
        try:
            found = self._list(key)
        except KeyError:
            return self._inserted(self._next_line(_end(self._list(("tables",)))), f"{key[0]}:{self._newline}  - {item}")
        if not found.flow_style:
            first = self._dash(found.value[0])
            indent = self._text[self._line(first) : first]
            indent = indent if not indent.strip() else " " * len(indent)
            return self._inserted(self._next_line(_end(found)), f"{indent}- {item}")
        item = item if name is None else f"{{{item}}}"
        if found.value:
            end = found.value[-1].end_mark.index
            return self._spliced(end, end, f", {item}")
        return self._spliced(found.start_mark.index, found.end_mark.index, f"[{item}]")

    @property
    def _text(self) -> str:
        return self.text[self._shift :]

    @property
    def _newline(self) -> str:
        return "\r\n" if "\r\n" in self.text else "\n"

    def _list(self, key: tuple[str | int, ...]) -> SequenceNode:
        """Return the node of the list at `key`; raises KeyError if the text has no list there."""
        node: Any = self._root
        for part in key:
            node = node.value[part] if isinstance(part, int) else dict(_entries(node))[str(part)][1]
        if not isinstance(node, SequenceNode):
            raise KeyError(key)
        return node

    def _colon(self, key: tuple[str | int, ...]) -> int:
        """Return the offset in the text directly after the colon of the given key."""
        node: Any = self._root
        for part in key[:-1]:
            node = node.value[part] if isinstance(part, int) else dict(_entries(node))[str(part)][1]
        name = dict(_entries(node))[str(key[-1])][0]
        return self._text.index(":", name.end_mark.index) + 1

    def _dash(self, item: Node) -> int:
        return self._text.rindex("-", 0, item.start_mark.index)

    def _line(self, index: int) -> int:
        """Return the offset of the beginning of the line that contains the offset `index`."""
        return self._text.rfind("\n", 0, index) + 1

    def _next_line(self, index: int) -> int:
        end = self._text.find("\n", index)
        return len(self._text) if end < 0 else end + 1

    def _inserted(self, index: int, line: str) -> str:
        """Return the text with a new line inserted before the line that begins at the offset `index`."""
        before = "" if index == 0 or self._text[index - 1] == "\n" else self._newline
        after = self._newline if before == "" or index < len(self._text) else ""
        return self._spliced(index, index, f"{before}{line}{after}")

    def _spliced(self, begin: int, end: int, new: str) -> str:
        return f"{self.text[: self._shift + begin]}{new}{self.text[self._shift + end :]}"


def _entries(node: Node) -> list[tuple[str, tuple[Node, Node]]]:
    return [(name.value, (name, value)) for name, value in node.value] if isinstance(node, MappingNode) else []


def _end(node: Node) -> int:
    """Return the offset after the last character of the node, without the comments that follow a block."""
    if isinstance(node, MappingNode) and node.value and not node.flow_style:
        return _end(node.value[-1][1])
    if isinstance(node, SequenceNode) and node.value and not node.flow_style:
        return _end(node.value[-1])
    return int(node.end_mark.index)


def _covers(globs: Sequence[str], table: str) -> bool:
    """Return True if `globs` certainly match every table that the glob `table` matches.

    If `table` contains wildcards, members of `globs` with `?` or `[` count only if they equal `table`.
    """
    if not any(char in table for char in "*?["):
        return matches(table, globs)
    simple = [glob for glob in globs if not any(char in glob for char in "?[")]
    return table in globs or matches(table, simple)


def _written(value: str) -> str:
    escaped = value.replace("${", "$${")
    return escaped if _PLAIN.match(escaped) else "'" + escaped.replace("'", "''") + "'"
