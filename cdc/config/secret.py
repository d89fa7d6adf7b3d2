"""Secret: a value that a definition contains as a reference and that is never printed.

A reference is `${VAR}`, `{env: VAR}` or `{file: PATH}`. Loading the definition reads the value, so a missing value is
found before anything starts. A secret file is read again for every new connection, so that a password can change
while a process runs. Text without a password, such as a DSN for peer authentication, can be written literally.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationInfo
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from cdc.config.interpolation import Interpolated

HIDDEN: Final = "***"
_FORM: Final = "expected ${VAR}, {env: VAR} or {file: PATH}"
_LONGEST_FILE: Final = 64 * 1024
"""Maximum bytes of a secret file; no password is longer, so a larger file is a mistake."""


class Secret:
    """A secret value; `str` and `repr` show `***` instead of it."""

    __slots__ = ("_again", "_file", "_value", "reference")

    def __init__(
        self, value: str, reference: Any = HIDDEN, again: Callable[[], str] | None = None, file: str = ""
    ) -> None:
        self._value = value
        self._again = again
        self._file = file
        self.reference = reference
        """Reference as the definition contains it, for printing: text, or a mapping with one key."""

    def reveal(self) -> str:
        """Return the secret value, for the call that needs it; never put it into a message."""
        return self._value

    def current(self) -> str:
        """Return the present value of the secret file.

        If there is no secret file or its content is invalid, return the value that was read with the definition.
        """
        if self._again is not None:
            with suppress(PydanticCustomError, OSError):
                return self._again()
        return self._value

    def reread(self) -> str | None:
        """Return the present value of the secret file, or None if the file has no valid value.

        If the secret does not come from a file, return the value that was read with the definition.
        """
        if self._again is None:
            return self._value
        try:
            return self._again()
        except (PydanticCustomError, OSError):
            return None

    @property
    def portable_reference(self) -> Any:
        """Reference for another process on this machine; the path of a secret file is absolute.

        For a secret that the definition contains literally, the reference is the value itself.
        """
        if self._file:
            return {"file": self._file}
        return self._value if self.reference == HIDDEN else self.reference

    def __repr__(self) -> str:
        return HIDDEN

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return a schema that validates with `_read` and serializes the secret as its reference."""
        return core_schema.with_info_plain_validator_function(
            _read, serialization=core_schema.plain_serializer_function_ser_schema(lambda secret: secret.reference)
        )

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Return the JSON schema of a secret: a text, or a mapping with the key `env` or `file`."""
        one = {"type": "object", "additionalProperties": False}
        return {
            "anyOf": [
                {"type": "string"},
                {**one, "properties": {"env": {"type": "string"}}, "required": ["env"]},
                {**one, "properties": {"file": {"type": "string"}}, "required": ["file"]},
            ]
        }


def _read(value: Any, info: ValidationInfo) -> Secret:
    if isinstance(value, Secret):
        return value
    if isinstance(value, Interpolated):
        return Secret(_checked(str(value)), value.written)
    if isinstance(value, str):
        return Secret(value)
    if not isinstance(value, Mapping) or len(value) != 1:
        raise PydanticCustomError("secret", _FORM)
    (kind, name), *_ = value.items()
    fetch = {"env": _from_variable, "file": _from_file}.get(kind)
    if fetch is None or not isinstance(name, str):
        raise PydanticCustomError("secret", _FORM)
    context = info.context or {}
    directory = context.get("directory", ".")
    again = partial(fetch, name, {"directory": directory}) if kind == "file" else None
    file = str(Path(directory, name).absolute()) if kind == "file" else ""
    return Secret(fetch(name, context), {kind: getattr(name, "written", name)}, again, file)


def _from_variable(name: str, context: Mapping[str, Any]) -> str:
    value = context.get("environment", os.environ).get(name)
    if not value:
        state = "not set" if value is None else "empty"
        raise PydanticCustomError(
            "unset", "environment variable {name} is {state}", {"name": repr(name), "state": state}
        )
    return _checked(value)


def _from_file(name: str, context: Mapping[str, Any]) -> str:
    path = Path(context.get("directory", "."), name)
    try:
        with path.open(encoding="utf-8") as file:
            value = file.read(_LONGEST_FILE + 1)
    except (OSError, UnicodeDecodeError) as error:
        why = (
            "the file is not UTF-8"
            if isinstance(error, UnicodeDecodeError)
            else (error.strerror or "unknown reason").lower()
        )
        raise PydanticCustomError("unset", "secret file cannot be read: {why}", {"why": why}) from None
    value = value.removesuffix("\n").removesuffix("\r")
    if not value or len(value) > _LONGEST_FILE:
        raise PydanticCustomError("unset", "secret file is {what}", {"what": "too long" if value else "empty"})
    if path.stat().st_mode & 0o007:
        context.get("advice", []).append((name, "every user of this machine can read the secret file: run chmod 600"))
    return _checked(value)


def _checked(value: str) -> str:
    """Return the value; raise a validation error for white space at its ends and for control characters.

    Copy and paste adds such characters, and a login with them fails.
    """
    if value != value.strip():
        raise PydanticCustomError("secret", "the value of the secret begins or ends with white space")
    if not value.isprintable():
        raise PydanticCustomError(
            "secret", "the value of the secret contains a line break or another control character"
        )
    return value


def _referenced(secret: Secret) -> Secret:
    if secret.reference == HIDDEN:
        raise PydanticCustomError(
            "invalid", "a password or key is in plain text: write ${VAR}, {env: VAR} or {file: PATH} instead"
        )
    return secret


ReferencedSecret = Annotated[Secret, AfterValidator(_referenced)]
"""A secret that a definition may not contain literally."""
