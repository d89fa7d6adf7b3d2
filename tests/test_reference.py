"""The reference pages are those that the code generates now, and the runbook has every error with its remedy."""

from __future__ import annotations

import re

import pytest

from cdc.errors import all_error_classes
from tests.reference import PAGES, ROOT, pages

PAGE_NAMES = [path.name for path in sorted(PAGES.iterdir())]
ERRORS = [error for error in all_error_classes() if error.__module__ == "cdc.errors"]


@pytest.mark.parametrize("page", PAGE_NAMES)
def test_a_page_is_what_the_code_generates(page: str) -> None:
    written = (PAGES / page).read_text(encoding="utf-8")
    assert written == pages()[page], "run: python -m tests.reference"


def test_the_directory_has_no_other_page() -> None:
    assert set(PAGE_NAMES) == set(pages())


def test_every_error_code_and_definition_key_is_on_a_page() -> None:
    generated = pages()
    assert all(error.code in generated["errors.md"] for error in ERRORS)
    example = (ROOT / "config" / "shop.yaml").read_text(encoding="utf-8")
    keys = set(re.findall(r"^\s*(?:- )?([a-z_]+):", example, re.MULTILINE))
    assert {key for key in keys if f"| `{key}` |" not in generated["definition.md"]} == set()


def test_the_runbook_has_a_section_with_the_remedy_of_each_class() -> None:
    text = (ROOT / "deploy" / "RUNBOOK.md").read_text(encoding="utf-8")
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    errors = {f"{error.code} {error.__name__}": error for error in ERRORS}
    assert sections.keys() == errors.keys()
    assert [name for name, error in errors.items() if f"- **Do**: {error.remedy}.\n" not in sections[name]] == []
