"""Loading of a definition file: a Definition, or all issues of the file at once."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cdc.config.columns import CORRECT_RULE, ColumnMismatch
from cdc.config.cross_checks import disagreements
from cdc.config.definition import Definition
from cdc.config.pydantic_errors import issues_of
from cdc.config.yaml_document import FAULTY, Key, YamlDocument, read_document
from cdc.errors import ConfigIssue, InvalidDefinition, TransformFailed, UnsetVariable

_BY_SPARK: Final = {"transform", "partition_by", "cluster_by"}
"""Keys whose issues are found completely only by Spark."""


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """The result of a check: the definition if there is no fatal issue, and all issues."""

    definition: Definition | None
    flaws: tuple[ConfigIssue, ...]
    """All issues in the order of the file, including warnings."""
    written: Any
    """Plain values of the file; text with variables is Interpolated."""


def load_definition(path: Path, environment: Mapping[str, str] | None = None) -> Definition:
    """Load the definition in the file; its paths are relative to the file's directory.

    Raises InvalidDefinition with all issues, or UnsetVariable if all of them are unset variables. Reads the file, the
    environment (by default that of the process) and the secret files that the definition names.
    """
    checked = check_definition(path, environment)
    if checked.definition is not None:
        return checked.definition
    fatal = tuple(flaw for flaw in checked.flaws if flaw.fatal)
    unset = all(flaw.code == UnsetVariable.code for flaw in fatal)
    raise (UnsetVariable if unset else InvalidDefinition).from_issues(fatal)


def check_definition(
    path: Path, environment: Mapping[str, str] | None = None, content: bytes | None = None
) -> CheckedDefinition:
    """As load_definition, but return the issues instead of raising them; `content` replaces that of the file."""
    environment = os.environ if environment is None else environment
    document = read_document(path, environment, content)
    definition = None
    if isinstance(document.values, dict):
        definition = _validated(document, path, environment)
    elif not document.flaws:
        document.note((), "expected a mapping of keys to values")
    flaws = tuple(sorted(document.flaws, key=lambda flaw: (flaw.line, flaw.column)))
    sound = definition is not None and not any(flaw.fatal for flaw in flaws)
    return CheckedDefinition(definition if sound else None, flaws, document.values)


def issues_in_file(path: Path, misfits: Iterable[ColumnMismatch]) -> tuple[ConfigIssue, ...]:
    """Mismatches with the tables as issues with line and column, in the order of the file."""
    found = list(misfits)
    if not found:
        return ()
    document, flaws = read_document(path, os.environ), list[ConfigIssue]()
    for key, error in found:
        # nothing has been written yet, so nothing has to be restarted or rebuilt
        correction = "correct the rule" if error.fix in {CORRECT_RULE, TransformFailed.remedy} else error.fix
        doctor = "cdc doctor --rules" if _BY_SPARK & set(key) else "cdc doctor"
        fix = f"{correction}, then check with '{doctor} -c {path}'"
        # the issue shows the key before the message
        flaws.append(document.flaw(key, error.message.removeprefix(f"{key[-1]}: "), code=error.code, fix=fix))
    return tuple(sorted(flaws, key=lambda flaw: (flaw.line, flaw.column)))


def unprotected_service(definition: Definition) -> list[ColumnMismatch]:
    """The mismatch of a public service.host without a token, which only concerns the server."""
    error = definition.service.exposure
    return [] if error is None else [ColumnMismatch(("service", "host"), error)]


def _validated(document: YamlDocument, path: Path, environment: Mapping[str, str]) -> Definition | None:
    advice: list[tuple[str, str]] = []
    context = {"directory": path.absolute().parent, "environment": environment, "advice": advice}
    try:
        definition = Definition.model_validate(document.values, context=context)
    except ValidationError as error:
        found = list(issues_of(error.errors(include_url=False), document, Definition.model_json_schema()))
        explained = {flaw.key for flaw in document.flaws} | set(_misspelt(found))
        document.flaws.extend(flaw for flaw in found if flaw.key not in explained)
        return None
    for key, message in disagreements(definition):
        document.note(key, message)
    for name, message in advice:
        document.note(_where(document.values, name), message, fatal=False)
    return definition


def _misspelt(flaws: list[ConfigIssue]) -> Iterator[str]:
    """Keys that the file contains under a misspelt name, so that they are not reported as missing."""
    for flaw in flaws:
        if flaw.suggestion is not None:
            above = flaw.key.rpartition(".")[0]
            yield f"{above}.{flaw.suggestion}" if above else flaw.suggestion


def _where(values: Any, wanted: str, key: Key = ()) -> Key:
    """The key whose value is the text; () if there is none."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for part, value in entries:
        if value is not FAULTY and value == wanted:
            return (*key, part)
        if found := _where(value, wanted, (*key, part)):
            return found
    return ()
