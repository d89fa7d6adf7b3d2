"""Building blocks of the models of a definition: their base class, and field types such as names, globs and paths."""

from __future__ import annotations

import ast
import inspect
import os
import re
import textwrap
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Final

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    ValidationInfo,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from cdc.config.interpolation import Interpolated

SCHEMES: Final = ("s3", "s3a", "gs", "abfss", "file")
"""URL schemes of supported stores; a path without a scheme is local."""
_GLOB: Final = re.compile(r"[^\x00-\x1f\x7f]+\.[^\x00-\x1f\x7f]+\Z")
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


class Model(BaseModel):
    """Base class of all models of a definition."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        allow_inf_nan=False,
        defer_build=True,  # one validator for a whole definition instead of one more for each of its parts
    )

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema, in which each field has its docstring as description.

        Pydantic itself would parse the source of all models whenever a command starts, which takes 90 ms.
        """
        schema = handler(core)
        fields = handler.resolve_ref_schema(schema)["properties"]
        for model in reversed([base for base in cls.__mro__ if issubclass(base, Model)]):
            for name, text in _attribute_docstrings(model).items():
                fields[name]["description"] = text
        return schema


def _attribute_docstrings(model: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class, by field."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - the source of a class
    return {
        field.target.id: inspect.cleandoc(below.value.value)
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def invalid(message: str, **context: Any) -> PydanticCustomError:
    """Return a validation error. The message must not contain input values; `context` fills its {placeholders}."""
    return PydanticCustomError("invalid", message, context or None)


def _glob(text: str) -> str:
    if not _GLOB.match(text):
        raise invalid("expected a glob over schema.table, for example shop.*")
    return text


def _whole(value: Any) -> Any:
    if isinstance(value, Interpolated) and value.isascii() and value.isdigit():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise invalid("expected a whole number")
    return value


def _share(value: Any) -> Any:
    if isinstance(value, Interpolated):
        with suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise invalid("expected a number, for example 0.05")
    return value


def _switch(value: Any) -> Any:
    if isinstance(value, Interpolated) and value in {"true", "false"}:
        return value == "true"
    if not isinstance(value, bool):
        raise invalid("expected true or false")
    return value


def _location(text: str, info: ValidationInfo) -> str:
    if not text.strip() or not text.isprintable():
        raise invalid("expected a path")
    scheme = _SCHEME.match(text)
    if scheme is not None:
        if scheme[1] not in SCHEMES:
            raise invalid("expected a local path or one of {schemes}", schemes=", ".join(f"{s}://" for s in SCHEMES))
        return text.rstrip("/")
    return absolute_path(text, info)


def absolute_path(path: str, info: ValidationInfo) -> str:
    """Return the normalized local path; a relative path starts at the definition's directory if that is known."""
    directory = (info.context or {}).get("directory", "")
    return os.path.normpath(Path(directory, Path(path).expanduser()))


def placeholders(text: str) -> list[str]:
    """Return the names in braces, in order; raises a validation error for unbalanced braces."""
    try:
        return [name for _, name, _, _ in Formatter().parse(text) if name is not None]
    except ValueError:
        raise invalid("unbalanced braces: write a placeholder as {schema} or {table}") from None


def only_placeholders(*allowed: str) -> AfterValidator:
    """Return a validator that refuses every placeholder but these."""
    known = ", ".join(f"{{{name}}}" for name in sorted(allowed))

    def check(text: str) -> str:
        if unknown := set(placeholders(text)) - set(allowed):
            raise invalid("unknown placeholder {name}: expected one of {known}", name=repr(min(unknown)), known=known)
        return text

    return AfterValidator(check)


def fixed_part(path: str) -> str:
    """Return the directory above the first placeholder; the whole path if it has no placeholder."""
    head, brace, _ = path.partition("{")
    return head.rpartition("/")[0] if brace else path


def directories_overlap(one: str, other: str) -> bool:
    """Return True if the two directories are equal, or if one is inside the other."""
    return f"{one}/".startswith(f"{other}/") or f"{other}/".startswith(f"{one}/")


def is_remote(path: str) -> bool:
    """Return True if the path is in an object store."""
    scheme = _SCHEME.match(path)
    return scheme is not None and scheme[1] != "file"


def sibling_path(path: str, name: str) -> str:
    """Return the path of `name` in the directory that contains `path`."""
    return f"{path.rpartition('/')[0] or '.'}/{name}"


LONGEST_NAME: Final = 40
"""Maximum number of characters of a Name."""
Name = Annotated[str, Field(pattern=rf"^[a-z][a-z0-9_]{{0,{LONGEST_NAME - 1}}}$")]
"""Name of a pipeline or a sink; short and plain, because slot, publication and file names contain it."""
Identifier = Annotated[str, Field(min_length=1, max_length=63)]
"""An identifier in Postgres, of at most 63 characters; Postgres silently truncates a longer one."""
SlotName = Annotated[str, Field(pattern=r"^[a-z0-9_]{1,63}$")]
"""A name that Postgres accepts for a replication slot."""
Glob = Annotated[str, AfterValidator(_glob)]
"""A pattern over `schema.table`, case-sensitive as in `fnmatch.fnmatchcase`."""
Location = Annotated[str, AfterValidator(_location)]
"""A local path, absolute or relative to the definition's directory, or a URI."""
Whole = Annotated[int, BeforeValidator(_whole)]
"""An integer; text and booleans are rejected."""
Share = Annotated[float, Field(gt=0, le=1), BeforeValidator(_share)]
"""A fraction above 0 and at most 1."""
Switch = Annotated[bool, BeforeValidator(_switch)]
"""A boolean; yes, no, on, off, 0 and 1 are rejected."""
