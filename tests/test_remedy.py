"""Remedy: a command in it can be copied as it stands, with its sink, its table and its definition."""

from __future__ import annotations

import re
import subprocess

import pytest

from cdc.cli.app import application
from cdc.errors import CdcError, all_error_classes
from cdc.remedy import COMMAND, complete_remedy


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


@pytest.mark.parametrize("error", all_error_classes(), ids=lambda error: error.__name__)
def test_a_command_in_a_remedy_is_one_of_ours_with_all_that_it_needs(error: type[CdcError]) -> None:
    from typer.main import get_command

    for command in COMMAND.findall(error.remedy):
        known, words = get_command(application()), command.split()[1:]
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
