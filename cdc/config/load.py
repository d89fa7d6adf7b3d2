"""load: a file as a Definition, or every flaw of it at once."""

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
"""Keys of which only Spark finds everything that is wrong."""


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """What a file says: a definition if nothing fatal was found, and all that was found."""

    definition: Definition | None
    flaws: tuple[ConfigIssue, ...]
    """In the order of the file; advice is among them."""
    written: Any
    """The plain values of the file; text with variables keeps what was written."""


def load_definition(path: Path, environment: Mapping[str, str] | None = None) -> Definition:
    """The definition in the file; paths in it are relative to the file's directory.

    Raises InvalidDefinition with all flaws (UnsetVariable if they are nothing but that). Reads the
    file, the environment (the process' own by default) and the secret files that it names.
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
    """As load, but hands the flaws back instead of raising them; `content` is what is going to stand in the file."""
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
    """What was found once the tables were known, at its places in the file, in the order of the file."""
    found = list(misfits)
    if not found:
        return ()
    document, flaws = read_document(path, os.environ), list[ConfigIssue]()
    for key, error in found:
        # before anything is written there is nothing to start or to build again
        mend = "mend the rule" if error.fix in {CORRECT_RULE, TransformFailed.remedy} else error.fix
        again = "cdc doctor --rules" if _BY_SPARK & set(key) else "cdc doctor"
        fix = f"{mend}, then see that '{again} -c {path}' finds nothing more"
        # the key stands before the message already
        flaws.append(document.flaw(key, error.message.removeprefix(f"{key[-1]}: "), code=error.code, fix=fix))
    return tuple(sorted(flaws, key=lambda flaw: (flaw.line, flaw.column)))


def unprotected_service(definition: Definition) -> list[ColumnMismatch]:
    """The address of a service that other machines reach without a token; commands but the server do without it."""
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
    """Keys that stand in the file under a wrong name: they are not missing as well."""
    for flaw in flaws:
        if flaw.suggestion is not None:
            above = flaw.key.rpartition(".")[0]
            yield f"{above}.{flaw.suggestion}" if above else flaw.suggestion


def _where(values: Any, wanted: str, key: Key = ()) -> Key:
    """The key at which the text stands, () if nowhere."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for part, value in entries:
        if value is not FAULTY and value == wanted:
            return (*key, part)
        if found := _where(value, wanted, (*key, part)):
            return found
    return ()
