"""Errors: every class stands in order and has a code, a reaction and a remedy."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from cdc import errors
from cdc.cli.app import application
from cdc.errors import COMMAND, CdcError, ExitCode, Reaction, all_error_classes, complete_remedy, process_exit_code
from tests.fixtures.rules import of_each

AREAS = {"1": ExitCode.USAGE, "6": ExitCode.FINDING}
RUNBOOK = Path(__file__).resolve().parent.parent / "deploy" / "RUNBOOK.md"
OURS = [error for error in all_error_classes() if error.__module__ == "cdc.errors"]
BASES = [error for error in OURS if error.__base__ is CdcError]
of_ours = of_each(lambda: OURS, lambda error: error.__name__)
of_all = of_each(all_error_classes, lambda error: error.__name__)


@of_ours
def test_a_class_is_complete(error: type[CdcError]) -> None:
    assert re.fullmatch(r"CDC-\d{4}", error.code)
    assert isinstance(error.reaction, Reaction)
    assert isinstance(error.exit_code, ExitCode)
    assert error.remedy
    assert error.__doc__


def test_classes_stand_in_the_order_of_their_codes() -> None:
    codes = [value.code for value in vars(errors).values() if isinstance(value, type) and value in OURS]

    assert codes == sorted(codes)


def test_the_table_of_the_docstring_has_every_area_with_its_exit_status() -> None:
    rows = re.findall(r"^\| (CDC-\d)xxx \| (\w+) \|.*\| (\d) \|$", errors.__doc__ or "", re.MULTILINE)

    assert rows == [(base.code[:5], base.__name__, str(base.exit_code.value)) for base in BASES]


@of_ours
def test_an_error_that_halts_declares_whether_a_person_has_to_act(error: type[CdcError]) -> None:
    halts = error.reaction is Reaction.HALT and error.exit_code is ExitCode.RUNTIME
    if halts and error not in (CdcError, *BASES):
        assert "needs_operator" in vars(error)
    else:
        assert not error.needs_operator


@of_ours
def test_a_code_lies_in_the_area_of_its_parent(error: type[CdcError]) -> None:
    parents = [p for p in error.__mro__[1:] if issubclass(p, CdcError) and p is not CdcError]
    for parent in parents:
        assert error.code[:5] == parent.code[:5]


@of_ours
def test_the_area_decides_usage_and_findings(error: type[CdcError]) -> None:
    expected = AREAS.get(error.code[4])

    assert expected is None or error.exit_code == expected


@of_ours
def test_a_remedy_is_a_sentence_without_a_full_stop(error: type[CdcError]) -> None:
    assert not error.remedy.endswith(".")
    # a command in quotes or an HTTP verb may begin it, a capitalised sentence may not
    assert not error.remedy[:2].istitle()


@of_ours
def test_the_runbook_has_a_section_for_the_code(error: type[CdcError]) -> None:
    assert f"## {error.code} " in _runbook()


@cache
def _runbook() -> str:
    return RUNBOOK.read_text(encoding="utf-8")


def test_a_process_ends_with_5_where_only_a_person_changes_something() -> None:
    assert process_exit_code(errors.PublicationNarrowed("x")) is ExitCode.HALTED
    assert process_exit_code(errors.UndecodableWal("x")) is ExitCode.HALTED
    assert process_exit_code(errors.LogFenced("x")) is ExitCode.RUNTIME
    assert process_exit_code(errors.SourceError("nobody knows")) is ExitCode.RUNTIME
    assert process_exit_code(errors.SlotInUse("x")) is ExitCode.RUNTIME
    assert process_exit_code(errors.PreflightFailed("x")) is ExitCode.ENVIRONMENT
    assert process_exit_code(errors.InvalidDefinition("x")) is ExitCode.USAGE


def test_no_two_classes_share_a_code() -> None:
    codes = [error.code for error in OURS]

    assert len(codes) == len(set(codes))


def test_a_closer_remedy_replaces_that_of_the_class() -> None:
    assert CdcError("it broke").fix == CdcError.remedy
    assert CdcError("it broke", remedy="mend it").fix == "mend it"
    assert str(CdcError("it broke")) == "it broke"


def test_retrying_is_earned_and_halting_the_default() -> None:
    assert CdcError.reaction is Reaction.HALT
    assert {e.__name__ for e in all_error_classes() if e.reaction is Reaction.RETRY} >= {
        "SourceUnreachable",
        "SinkUnavailable",
    }


@pytest.mark.parametrize(
    ("remedy", "told"),
    [
        ("run 'cdc status'", "run 'cdc status -c s.yaml'"),
        ("then 'cdc replay SINK --tables TABLE'", "then 'cdc replay lake --tables shop.t -c s.yaml'"),
        ("'cdc slots drop -c FILE' frees it", "'cdc slots drop -c s.yaml' frees it"),
        ("run 'cdc log drop-file FILE'", "run 'cdc log drop-file FILE -c s.yaml'"),
        ("correct it and run 'cdc validate'", "correct it and run 'cdc validate s.yaml'"),
        ("see 'cdc dlq ls -c s.yaml'", "see 'cdc dlq ls -c s.yaml'"),
        ("run 'cdc dlq ls --help'", "run 'cdc dlq ls --help'"),
        ("run 'cdc explain' for all codes", "run 'cdc explain' for all codes"),
        ("ALTER TABLE … at the source, and 'go on' with SINK", "ALTER TABLE … at the source, and 'go on' with SINK"),
    ],
)
def test_a_command_gets_the_names_that_are_known(remedy: str, told: str) -> None:
    assert complete_remedy(remedy, sink="lake", topic="shop.t", file="s.yaml") == told


def test_what_is_not_known_stays_and_a_name_with_a_space_is_one_word() -> None:
    remedy = "build it anew: 'cdc replay SINK --tables TABLE'"
    assert complete_remedy(remedy) == remedy
    told = complete_remedy(remedy, topic="shop.my table", file="my shop.yaml")
    assert told == 'build it anew: \'cdc replay SINK --tables "shop.my table" -c "my shop.yaml"\''
    assert complete_remedy(told, sink="lake", file="my shop.yaml") == told.replace("SINK", "lake")


@cache
def _commands() -> Any:
    return get_command(application())


@of_all
def test_a_command_in_a_remedy_is_one_of_ours_with_all_that_it_needs(error: type[CdcError]) -> None:
    for command in COMMAND.findall(error.remedy):
        known, words = _commands(), command.split()[1:]
        while words and hasattr(known, "commands"):
            known = known.commands[words.pop(0)]
        words = [re.sub(r"^[A-Z]+$", "1", word) for word in words if word != "..."]
        known.make_context("cdc", [*words, *(["s.yaml"] if command == "cdc validate" else [])])


@pytest.mark.parametrize("name", ["shop.a b", "shop.$(touch x)", "shop.`id`", 'shop."x"', "shop.a\\b", "shop.$HOME;id"])
def test_a_shell_takes_a_name_as_it_is(name: str) -> None:
    said = complete_remedy("run 'cdc tables resync TABLE'", topic=name)
    command = said.removeprefix("run '").removesuffix("'")
    script = f'set -- {command}; printf %s "$4"'
    assert subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout == name
