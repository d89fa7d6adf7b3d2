"""The reference pages are those that the code generates now."""

from __future__ import annotations

import re

import pytest

from cdc.errors import all_error_classes
from tests.reference import PAGES, ROOT, pages


@pytest.mark.parametrize("page", pages())
def test_a_page_is_what_the_code_generates(page: str) -> None:
    written = (PAGES / page).read_text(encoding="utf-8")
    assert written == pages()[page], "run: python -m tests.reference"


def test_no_other_page_lies_beside_them() -> None:
    assert {path.name for path in PAGES.iterdir()} == set(pages())


def test_every_error_code_and_definition_key_is_on_a_page() -> None:
    generated = pages()
    assert all(
        error.code in generated["errors.md"] for error in all_error_classes() if error.__module__ == "cdc.errors"
    )
    example = (ROOT / "config" / "shop.yaml").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\s*(?:- )?([a-z_]+):", example, re.MULTILINE))
    assert {key for key in keys if f"| `{key}` |" not in generated["definition.md"]} == set()


def test_the_runbook_has_a_section_under_each_code_and_class() -> None:
    headings = set(re.findall(r"^## (.*)$", (ROOT / "deploy" / "RUNBOOK.md").read_text(encoding="utf-8"), re.MULTILINE))
    errors = {f"{error.code} {error.__name__}" for error in all_error_classes() if error.__module__ == "cdc.errors"}
    assert {heading for heading in headings if heading.startswith("CDC-")} == errors
