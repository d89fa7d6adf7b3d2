"""The demo's SQL files: every statement has a unique name and is used."""

from __future__ import annotations

import re

import pytest

from cdc.demo.shop_database import named_statements, script, script_text


def test_every_statement_of_the_workload_is_used_by_it() -> None:
    used = set(re.findall(r'_do\(\s*"(\w+)"', script_text("workload.py")))

    assert used == set(named_statements("workload"))


def test_every_statement_of_the_closing_is_used_by_it() -> None:
    used = set(re.findall(r'_run\(\s*"(\w+)"', script_text("dead_letter_step.py")))

    assert used == set(named_statements("closing"))


def test_names_are_unique_and_statements_are_not_empty() -> None:
    assert len(named_statements("workload")) == script_text("workload.sql").count("-- name:")
    assert all(named_statements("workload").values())


@pytest.mark.parametrize("name", ["shop", "seed", "workload", "closing"])
def test_a_file_begins_with_a_line_of_its_purpose(name: str) -> None:
    assert re.match(rb"-- [A-Z][^\n]{20,}\n", script(name))
