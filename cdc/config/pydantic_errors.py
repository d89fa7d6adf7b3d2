"""Translation of pydantic's errors to issues with line, column and a suggested key, but without input values.

If the user wrote a key or value of another tool, the issue explains what to write in a definition instead, or why a
definition needs no such key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any, Final

from pydantic_core import ErrorDetails

from cdc.config.yaml_document import Key, YamlDocument
from cdc.errors import ConfigIssue, UnsetVariable

_EVERY_ROW: Final = "not needed, because every row of the log contains this information"
_NULLS: Final = "not needed, because the log distinguishes a NULL from a column that was not sent"

AUTO_CDC: Final = {
    "keys": f"{_EVERY_ROW}: the key is the primary key at the source, or the replica identity",
    "sequence_by": f"{_EVERY_ROW}: the log is in commit order",
    "apply_as_deletes": f"{_EVERY_ROW}: deletes are applied; 'mode: soft_delete' keeps and marks the row, "
    "'transform: {where: …}' leaves out rows by a condition",
    "apply_as_truncates": f"{_EVERY_ROW}: truncates at the source are applied",
    "ignore_null_updates": _NULLS,
    "ignore_null_updates_column_list": _NULLS,
    "ignore_null_updates_except_column_list": _NULLS,
    "columns_to_update": f"{_EVERY_ROW}: a column that was not sent keeps its value",
    "where": "write the condition as 'where' in the 'transform' of a rule",
}
"""Argument of Databricks AUTO CDC (`create_auto_cdc_flow`) that is no key of a Delta sink → explanation."""

TRANSFORM: Final = {
    "mask": "{email: redact}",
    "drop": "[email]",
    "rename": "{email: address}",
    "computed": "{total: price * amount}",
    "python": "company.rules:users",
}
"""Key of a rule's `transform` → example value, for the message about such a key outside `transform`."""

POLICIES: Final = {"reject": "write 'exact', which rejects values that a type cannot represent"}
"""Value of `types` in another tool → what to write in a definition instead."""


def issues_of(errors: list[ErrorDetails], document: YamlDocument, schema: Mapping[str, Any]) -> Iterator[ConfigIssue]:
    """Yield one issue per error; `schema` is the JSON schema of definitions, which lists the keys of each mapping."""
    for error in errors:
        if error["type"] == "too_short" and any(_within(other["loc"], error["loc"]) for other in errors):
            continue  # The list is short only because its entries are wrong.
        key, around = _untagged(error["loc"], schema)
        kind = error["type"]
        if kind == "union_tag_invalid":
            key = (*key, "type")
        code = UnsetVariable.code if kind == "unset" else "CDC-1002"
        message = _MESSAGES.get(kind, _own)(error) + _example(error, key)
        reason = _elsewhere(error, key, document, around)
        if reason is not None:
            yield document.issue(key, f"{message}: {reason}", code=code)
            continue
        yield document.issue(key, message, suggestion=_meant(error, key, document, around), code=code)


def _within(inner: tuple[str | int, ...], outer: tuple[str | int, ...]) -> bool:
    return len(inner) > len(outer) and inner[: len(outer)] == outer


def _untagged(loc: tuple[str | int, ...], schema: Mapping[str, Any]) -> tuple[Key, Mapping[str, Any]]:
    """Return the key for `loc` of a pydantic error, and the JSON schema of the mapping that contains the key.

    The key is `loc` without union tags: `("sinks", 0, "delta", "path")` → `("sinks", 0, "path")`.
    """
    key: list[str | int] = []
    node = around = _resolved(schema, schema)
    for part in loc:
        if part in node.get("discriminator", {}).get("mapping", {}):
            node = _resolved({"$ref": node["discriminator"]["mapping"][part]}, schema)
            continue
        key.append(part)
        around = node
        child = node.get("items") if isinstance(part, int) else node.get("properties", {}).get(part)
        node = _resolved(child or {}, schema)
    return tuple(key), around


def _resolved(node: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    # an optional model is `anyOf` of the model and null
    while parts := [part for part in (node, *node.get("anyOf", ())) if "$ref" in part]:
        node = schema["$defs"][parts[0]["$ref"].rpartition("/")[2]]
    return node


def _elsewhere(error: ErrorDetails, key: Key, document: YamlDocument, around: Mapping[str, Any]) -> str | None:
    """Return an explanation for a key or value of another tool, or for a misplaced transform key; otherwise None."""
    if error["type"] == "extra_forbidden" and "stored_as_scd_type" in around.get("properties", {}):
        return AUTO_CDC.get(str(key[-1]).lower()) or _transformed(str(key[-1]), around)
    if error["type"] == "enum" and "exact" in _choices(error):
        return POLICIES.get(_written(key, document).lower())
    return None


def _transformed(word: str, around: Mapping[str, Any]) -> str | None:
    """Return how to write the key `word` inside `transform`; None if TRANSFORM does not contain it.

    around: the JSON schema of the mapping in which the user wrote the key.
    """
    if word not in TRANSFORM:
        return None
    written = f"transform: {{{word}: {TRANSFORM[word]}}}"
    inside = "rules" in around.get("properties", {})
    return "write " + (f"rules: [{{match: shop.users, {written}}}]" if inside else written)


def _example(error: ErrorDetails, key: Key) -> str:
    """Return an example if a list of rules, or a rule in the list, has the wrong type; otherwise an empty text."""
    if error["type"] in {"model_type", "model_attributes_type"} and key[-2:-1] in {("tables",), ("rules",)}:
        return ": write - match: shop.*"
    return ": write [{match: shop.*}]" if error["type"] == "tuple_type" and key[-1] in {"tables", "rules"} else ""


def _meant(error: ErrorDetails, key: Key, document: YamlDocument, around: Mapping[str, Any]) -> str | None:
    if error["type"] == "extra_forbidden":
        wanted, choices = str(key[-1]), list(around.get("properties", {}))
    elif error["type"] in {"union_tag_invalid", "literal_error", "enum"}:
        wanted, choices = _written(key, document), _choices(error)
    else:
        return None
    near = get_close_matches(wanted.lower(), choices, n=1, cutoff=0.6)
    return near[0] if near else None


def _written(key: Key, document: YamlDocument) -> str:
    value: Any = document.values
    for part in key:
        value = value.get(part) if isinstance(value, dict) else _item(value, part)
    return value if isinstance(value, str) else ""


def _item(value: Any, place: str | int) -> Any:
    return value[place] if isinstance(value, list) and isinstance(place, int) else None


def _choices(error: ErrorDetails) -> list[str]:
    context = error.get("ctx", {})
    text = str(context.get("expected_tags") or context.get("expected", ""))
    return [word.strip(" '") for word in text.replace(" or ", ", ").split(",")]


def _one_of(error: ErrorDetails) -> str:
    return "expected " + " or ".join(f"'{word}'" for word in _choices(error))


def _limit(error: ErrorDetails) -> str:
    (name, value), *_ = error.get("ctx", {}).items()
    phrases = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    return f"expected {phrases.get(name, name)} {value:g}"


def _own(error: ErrorDetails) -> str:
    """Return the message of the error if this package wrote the message; otherwise name only the error's type.

    Pydantic's own messages could repeat the input.
    """
    return error["msg"] if error["type"] in _OURS else f"not valid here ({error['type']})"


_OURS: Final = {"invalid", "secret", "unset", "duration", "size"}
_SHAPES: Final = {
    "^[a-z][a-z0-9_]{0,39}$": "expected at most 40 characters of a-z, 0-9 and _, a letter first",
    "^[a-z0-9_]{1,63}$": "expected 1 to 63 characters of a-z, 0-9 and _, as Postgres requires for slots",
    r"^[A-Za-z][A-Za-z0-9_]{0,62}$": "expected at most 63 characters of A-Z, a-z, 0-9 and _, a letter first",
    r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$": "expected module:function, for example company.rules:users",
    r"^https?://[^\s/]+(/[^\s]*)?$": "expected a URL that begins with https:// or http://",
    r"^(sqlite|postgresql(\+psycopg)?)://": "expected a URL that begins with sqlite:/// or postgresql+psycopg://",
}

_MESSAGES: Final[Mapping[str, Callable[[ErrorDetails], str]]] = {
    "extra_forbidden": lambda _: "unknown key",
    "missing": lambda _: "required key is missing",
    "union_tag_not_found": lambda _: "required key is missing: type",
    "union_tag_invalid": _one_of,
    "literal_error": _one_of,
    "enum": _one_of,
    "string_type": lambda _: "expected text: put quotes around the value",
    "string_pattern_mismatch": lambda e: _SHAPES.get(e.get("ctx", {}).get("pattern", ""), "not of the expected form"),
    "string_too_short": lambda _: "expected text that is not empty",
    "string_too_long": lambda e: f"expected at most {e.get('ctx', {}).get('max_length')} characters",
    "too_short": lambda _: "expected at least one entry",
    "tuple_type": lambda _: "expected a list",
    "mapping_type": lambda _: "expected a mapping of keys to values",
    "dict_type": lambda _: "expected a mapping of keys to values",
    "model_type": lambda _: "expected a mapping of keys to values",
    "model_attributes_type": lambda _: "expected a mapping of keys to values",
    "greater_than": _limit,
    "greater_than_equal": _limit,
    "less_than": _limit,
    "less_than_equal": _limit,
}
