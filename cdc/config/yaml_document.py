"""YAML parser for definitions: parses YAML 1.2 to plain values, each with its line and column.

The parser accepts only mappings, lists and scalars of the core schema: no tags, no merge keys, no dates. It limits the
size of the file, the depth, and the number of values, which aliases can multiply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

from cdc.config.interpolation import interpolate
from cdc.errors import ConfigError, ConfigIssue

LARGEST: Final = 1024 * 1024
"""Maximum bytes of a definition; a list of a thousand tables needs 100 kB."""
MOST_VALUES: Final = 50_000
"""Maximum number of values after aliases are expanded; protects against an alias bomb."""
DEEPEST: Final = 24
"""Maximum nesting; the deepest key of a definition is at level 5."""

_CORE: Final = "tag:yaml.org,2002:"
_SHOWN: Final = re.compile(r"(?:[\w.*-]{1,64}|<<)\Z")
Key = tuple[str | int, ...]
"""Path of a value in a definition, such as ("sinks", 0, "path")."""


class SourceLocation(NamedTuple):
    """Line and column in a file, both from 1."""

    line: int
    column: int


@dataclass(slots=True)
class YamlDocument:
    """The values of one file, their source locations, and the issues that parsing found."""

    path: str
    values: Any = None
    places: dict[Key, SourceLocation] = field(default_factory=dict)
    """Key → location of an item of a list, or of the name of an entry of a mapping. The key () is the whole file."""
    issues: list[ConfigIssue] = field(default_factory=list)

    def issue(self, key: Key, message: str, **more: Any) -> ConfigIssue:
        """Return an issue at the location of the key, or of its nearest parent if the file does not contain the key."""
        place = next(self.places[key[:n]] for n in range(len(key), -1, -1) if key[:n] in self.places)
        return ConfigIssue(
            path=self.path, line=place.line, column=place.column, key=dotted_key(key), message=message, **more
        )

    def note(self, key: Key, message: str, **more: Any) -> None:
        """Add an issue to the document, at the location that `issue` finds for the key."""
        self.issues.append(self.issue(key, message, **more))


def dotted_key(key: Key) -> str:
    """Return the key as text, such as `sinks.0.path`; a part that may be a misplaced secret is hidden."""
    return ".".join(str(part) if _SHOWN.match(str(part)) else "…" for part in key)


def read_document(path: Path, environment: Mapping[str, str], content: bytes | None = None) -> YamlDocument:
    """Parse the file and interpolate variables; all issues are in the returned document, none is raised.

    `content` replaces the content of the file, for example for a change that is not written yet.
    """
    document = YamlDocument(str(path), places={(): SourceLocation(1, 1)})
    text = _text(path, document) if content is None else _decoded(content, document)
    if text is None:
        return document
    root = _compose(text, document)
    if root is not None:
        _Builder(document, environment).build(root)
    elif not document.issues:
        document.note((), "the file is empty")
    return document


def _text(path: Path, document: YamlDocument) -> str | None:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST + 1)
    except OSError as error:
        there = "choose the definition file with -c FILE" if isinstance(error, FileNotFoundError) else None
        document.note((), f"the file cannot be read: {(error.strerror or 'unknown reason').lower()}", fix=there)
        return None
    return _decoded(content, document)


def _decoded(content: bytes, document: YamlDocument) -> str | None:
    if len(content) > LARGEST:
        document.note((), f"the file is larger than {LARGEST // 1024} KiB")
        return None
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        before = content[: error.start]
        place = SourceLocation(before.count(b"\n") + 1, error.start - before.rfind(b"\n"))
        _note_at(document, place, "the file is not UTF-8")
        return None


def _compose(text: str, document: YamlDocument) -> Node | None:
    control = re.search(r"[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", text)
    if control is not None:
        before = text[: control.start()]
        place = SourceLocation(before.count("\n") + 1, control.start() - before.rfind("\n"))
        _note_at(document, place, f"character U+{ord(control[0]):04X} is not allowed in YAML")
        return None
    try:
        root: Node | None = YAML(typ="safe", pure=True).compose(text)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = SourceLocation(mark.line + 1, mark.column + 1) if mark else SourceLocation(1, 1)
        _note_at(document, place, _problem(error))
        return None
    except (YAMLError, RecursionError, ValueError):
        document.note((), "the file is not YAML")
        return None
    return root


def _problem(error: MarkedYAMLError) -> str:
    text = str(error.problem or "the file is not YAML")
    if "'\\t'" in text:
        return "indentation by tabs is not allowed: use spaces"
    return f"{error.context}: {text}" if error.context else text


def _note_at(document: YamlDocument, place: SourceLocation, message: str, key: Key = ()) -> None:
    document.issues.append(
        ConfigIssue(path=document.path, line=place.line, column=place.column, key=dotted_key(key), message=message)
    )


class _Builder:
    """Converts YAML nodes to plain values, and adds each issue that it finds to the document."""

    def __init__(self, document: YamlDocument, environment: Mapping[str, str]) -> None:
        self._document = document
        self._environment = environment
        self._built = 0

    def build(self, root: Node) -> None:
        try:
            self._document.values = self._value(root, ())
        except _TooLarge as error:
            self._document.note((), str(error))

    def _value(self, node: Node, key: Key) -> Any:
        self._built += 1
        if self._built > MOST_VALUES:
            raise _TooLarge(f"the file is too large: it has more than {MOST_VALUES} values, with aliases expanded")
        if len(key) > DEEPEST:
            raise _TooLarge(f"values are nested too deep: expected at most {DEEPEST} levels, with aliases expanded")
        if isinstance(node, MappingNode) and node.tag == f"{_CORE}map":
            return dict(self._entries(node, key))
        if isinstance(node, SequenceNode) and node.tag == f"{_CORE}seq":
            return [self._item(item, (*key, place)) for place, item in enumerate(node.value)]
        if isinstance(node, ScalarNode) and node.tag in _SCALARS:
            return self._scalar(node, key)
        self._document.note(key, "YAML tags are not allowed")
        return None

    def _item(self, node: Node, key: Key) -> Any:
        self._document.places[key] = _place(node)
        return self._value(node, key)

    def _entries(self, node: MappingNode, above: Key) -> Iterator[tuple[str, Any]]:
        seen: dict[str, SourceLocation] = {}
        for name_node, value_node in node.value:
            name = name_node.value if isinstance(name_node, ScalarNode) else ""
            key, place = (*above, name), _place(name_node)
            self._document.places.setdefault(key, place)
            if not isinstance(name_node, ScalarNode) or name_node.tag == f"{_CORE}merge":
                self._document.note(key, "merge keys (<<) and keys that are not text are not allowed")
            elif name in seen:
                message = f"duplicate key, first in line {seen[name].line}"
                _note_at(self._document, place, message, key)
            else:
                seen[name] = place
                yield name, self._value(value_node, key)

    def _scalar(self, node: ScalarNode, key: Key) -> Any:
        value = _SCALARS[node.tag](node.value)
        if not isinstance(value, str):
            return value
        try:
            return interpolate(value, self._environment)
        except ConfigError as error:
            self._document.note(key, error.message, code=error.code)
            return FAULTY


def _place(node: Node) -> SourceLocation:
    return SourceLocation(node.start_mark.line + 1, node.start_mark.column + 1)


def _integer(text: str) -> Any:
    digits = text.replace("_", "")
    try:
        return int(digits, 0) if digits.lstrip("+-").startswith(("0o", "0x", "0b")) else int(digits, 10)
    except ValueError:
        return text


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


_SCALARS: Final[Mapping[str | None, Callable[[str], Any]]] = {
    f"{_CORE}null": lambda _: None,
    f"{_CORE}bool": lambda text: text.lower() == "true" if text.lower() in {"true", "false"} else text,
    f"{_CORE}int": _integer,
    f"{_CORE}float": _number,
    f"{_CORE}str": str,
    # No key of a definition is a date: 2026-01-01 is text.
    f"{_CORE}timestamp": str,
}

FAULTY: Final = object()
"""Placeholder for a value with an issue; validation reports no further issues at its key."""


class _TooLarge(Exception):
    pass
