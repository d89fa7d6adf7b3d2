"""Loads, checks and prints a definition file; a check finds all issues at once, and printed text has no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cdc.config.definition import Definition
from cdc.config.definition_conflicts import disagreements, driver_written_sinks_on_spark, rules_without_effect
from cdc.config.interpolation import Interpolated
from cdc.config.pydantic_errors import issues_of
from cdc.config.secret import HIDDEN
from cdc.config.sink_rules import CORRECT_RULE, KeyConflict
from cdc.config.units import print_seconds, print_size
from cdc.config.yaml_document import FAULTY, Key, YamlDocument, read_document
from cdc.errors import ConfigIssue, InvalidDefinition, TransformFailed, UnsetVariable

_BY_SPARK: Final = {"transform", "partition_by", "cluster_by"}
"""Keys of a sink's rule for which only Spark finds all issues."""
_SENSITIVE: Final = re.compile(r"secret|password|token|access[._]?key|credential", re.IGNORECASE)
"""Pattern of the names of settings whose values are hidden; extends Spark's default of `spark.redaction.regex`."""
_URL_PASSWORD: Final = re.compile(r"(://[^:@/]*):[^@/]*@")
_DURATIONS: Final = (("cuts", "retain"), ("upkeep", "every"), ("upkeep", "vacuum_after"))
"""Paths inside a sink of the keys whose values are durations."""


@dataclass(frozen=True, slots=True)
class CheckedDefinition:
    """The result of a check: all issues, and the definition if no issue is fatal."""

    definition: Definition | None
    issues: tuple[ConfigIssue, ...]
    """All issues in the order of the file, including warnings."""
    written: Any
    """Content of the file as plain values; a text that contained variables is an Interpolated."""


def load_definition(path: Path, environment: Mapping[str, str] | None = None) -> Definition:
    """Load the definition in the file; its paths are relative to the file's directory.

    Raises InvalidDefinition with all issues, or UnsetVariable if all of them are unset variables. Reads the file, the
    environment (by default that of the process) and the secret files that the definition names.
    """
    checked = check_definition(path, environment)
    if checked.definition is not None:
        return checked.definition
    fatal = tuple(issue for issue in checked.issues if issue.fatal)
    unset = all(issue.code == UnsetVariable.code for issue in fatal)
    raise (UnsetVariable if unset else InvalidDefinition).from_issues(fatal)


def check_definition(
    path: Path, environment: Mapping[str, str] | None = None, content: bytes | None = None
) -> CheckedDefinition:
    """Check a definition as load_definition does, but return the issues instead of raising them.

    content: bytes to check instead of the content of the file.
    """
    environment = os.environ if environment is None else environment
    document = read_document(path, environment, content)
    definition = None
    if isinstance(document.values, dict):
        definition = _validated(document, path, environment)
    elif not document.issues:
        document.note((), "expected a mapping of keys to values at the top of the file")
    issues = tuple(sorted(document.issues, key=lambda issue: (issue.line, issue.column)))
    sound = definition is not None and not any(issue.fatal for issue in issues)
    return CheckedDefinition(definition if sound else None, issues, document.values)


def issues_in_file(path: Path, misfits: Iterable[KeyConflict]) -> tuple[ConfigIssue, ...]:
    """Return conflicts of keys as issues with their line and column in the file, in the order of the file."""
    found = list(misfits)
    if not found:
        return ()
    document, issues = read_document(path, os.environ), list[ConfigIssue]()
    for key, error in found:
        # nothing has been written yet, so nothing has to be restarted or rebuilt
        correction = "correct the rule" if error.fix in {CORRECT_RULE, TransformFailed.remedy} else error.fix
        doctor = "cdc doctor --rules" if _BY_SPARK & set(key) else "cdc doctor"
        fix = f"{correction}, then check with '{doctor} -c {path}'"
        # the issue shows the key before the message
        issues.append(document.issue(key, error.message.removeprefix(f"{key[-1]}: "), code=error.code, fix=fix))
    return tuple(sorted(issues, key=lambda issue: (issue.line, issue.column)))


def unprotected_service(definition: Definition) -> list[KeyConflict]:
    """Return one conflict if service.host is public and no token is set; otherwise an empty list.

    The conflict prevents only the start of the server.
    """
    error = definition.service.exposure
    return [] if error is None else [KeyConflict(("service", "host"), error)]


def _validated(document: YamlDocument, path: Path, environment: Mapping[str, str]) -> Definition | None:
    advice: list[tuple[str, str]] = []
    context = {"directory": path.absolute().parent, "environment": environment, "advice": advice}
    try:
        definition = Definition.model_validate(document.values, context=context)
    except ValidationError as error:
        found = list(issues_of(error.errors(include_url=False), document, _schema()))
        explained = {issue.key for issue in document.issues} | set(_misspelt(found))
        document.issues.extend(issue for issue in found if issue.key not in explained)
        return None
    for key, message in disagreements(definition):
        document.note(_key_in_file(key, document.values), message)
    for key, message in (*rules_without_effect(definition), *driver_written_sinks_on_spark(definition)):
        document.note(_key_in_file(key, document.values), message, fatal=False)
    for name, message in advice:
        document.note(_where(document.values, name), message, fatal=False)
    return definition


def _key_in_file(key: Key, values: Mapping[str, Any]) -> Key:
    """Return the key of the file; the views of a definition are those of the file and, after them, its documents."""
    written = len(values.get("views") or ())
    if key[0] == "views" and int(key[1]) >= written:
        return ("documents", int(key[1]) - written, *(part for part in key[2:] if part != "sql"))
    return key


@cache
def _schema() -> Mapping[str, Any]:
    """Return the JSON schema of definitions, which pydantic takes 60 ms to build."""
    return Definition.model_json_schema()


def _misspelt(issues: list[ConfigIssue]) -> Iterator[str]:
    """Yield the correct names of misspelt keys, so that these keys are not also reported as missing."""
    for issue in issues:
        if issue.suggestion is not None:
            above = issue.key.rpartition(".")[0]
            yield f"{above}.{issue.suggestion}" if above else issue.suggestion


def _where(values: Any, wanted: str, key: Key = ()) -> Key:
    """Return the key of the first value that equals `wanted`; () if no value does."""
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for part, value in entries:
        if value is not FAULTY and value == wanted:
            return (*key, part)
        if found := _where(value, wanted, (*key, part)):
            return found
    return ()


def printable_definition(definition: Definition, written: Any) -> dict[str, Any]:
    """Return a definition as plain values for printing.

    written: the values as the file contains them. A value that may contain a password is printed from `written`.
    """
    view = definition.model_dump(mode="json")
    source, log, spark = view["source"], view["log"], view["spark"]
    source["heartbeat"] = print_seconds(source["heartbeat"])
    spark["trigger"] = print_seconds(spark["trigger"])
    log["commit"] = {"bytes": print_size(log["commit"]["bytes"]), "linger": print_seconds(log["commit"]["linger"])}
    log["segment"] = {"bytes": print_size(log["segment"]["bytes"]), "every": print_seconds(log["segment"]["every"])}
    log["compact"] = {name: print_seconds(value) for name, value in log["compact"].items()}
    log["retain"] = {name: print_seconds(value) for name, value in log["retain"].items()}
    view["verify"]["every"] = print_seconds(view["verify"]["every"])
    for sink in view["sinks"]:
        for part, name in _DURATIONS:
            if part in sink:
                sink[part][name] = print_seconds(sink[part][name])
    view["catalog"]["url"] = _hidden_url(view["catalog"]["url"], _at(written, "catalog", "url"))
    spark["conf"] = {
        name: _hidden_setting(name, value, _at(written, "spark", "conf", name)) for name, value in spark["conf"].items()
    }
    return view


def _at(written: Any, *key: str) -> Any:
    for part in key:
        written = written.get(part) if isinstance(written, dict) else None
    return written


def _hidden_url(url: str, written: Any) -> str:
    if isinstance(written, Interpolated) and "@" in url:
        return written.written
    return _URL_PASSWORD.sub(rf"\1:{HIDDEN}@", url)


def _hidden_setting(name: str, value: str, written: Any) -> str:
    if isinstance(written, Interpolated):
        return written.written
    return HIDDEN if _SENSITIVE.search(name) else value
