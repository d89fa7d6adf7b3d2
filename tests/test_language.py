"""Language: no product file has a word that a reader of this field has to read twice.

A word that is right in one file has its reason in `RIGHT`.
"""

from __future__ import annotations

import re
from typing import Final

import pytest

from tests.source_tree import ROOT

WORDS: Final = {
    "anew": r"anew",
    "beside": r"beside",
    "bring": r"bring|brings|bringing|brought",
    "fate": r"fates?",
    "flaw": r"flaws?",
    "give way": r"(?:give|gives|gave|given|giving) way",
    "goes on": r"(?:goes|go|going|went|gone) on",
    "held": r"held|holds",
    "lacks": r"lacks?|lacked|lacking",
    "lays": r"lay|lays|laid",
    "look after": r"looks? after|looked after",
    "mend": r"mends?|mended|mending",
    "of itself": r"(?:of|by) (?:itself|themselves)",
    "on its way": r"on (?:its|their) way",
    "stands at": r"stands?|stood",
    "take up": r"(?:takes?|took|taken|taking) up",
    "tell": r"tells?|telling|told",
    "whoever": r"whoever",
    "wish": r"wish|wishes|wished",
}
"""Word to avoid → how it is spelled; an underscore counts as a space."""
ENDINGS: Final = (".py", ".md", ".yaml", ".yml", ".html", ".sql", ".service", ".toml")
RIGHT: Final[dict[tuple[str, str], str]] = {
    ("cdc/capture/initial_snapshot.py", "beside"): "`snapshot.beside` is a field of a definition",
    ("cdc/bucket_files.py", "lacks"): "a message of an object store that a pattern matches",
    ("cdc/bucket_files.py", "tell"): "a method of Python's file interface",
    ("cdc/log/table_io.py", "tell"): "a method of Python's file interface",
    ("cdc/README.md", "beside"): "`snapshot.beside` is a key of definitions",
    ("cdc/cli/consumers.py", "held"): "`holds_bytes` is a JSON field",
    ("cdc/cli/doctor.py", "flaw"): "`flaws` is a JSON field",
    ("cdc/cli/validate.py", "flaw"): "`flaws` is a JSON field",
    ("cdc/config/source.py", "beside"): "`snapshot.beside` is a key of definitions",
    ("cdc/metrics.py", "held"): "names of metrics stay the same: dashboards and alerts use them",
    ("cdc/service/api/prometheus_metrics.py", "held"): "constants named after cdc_log_held_bytes and holds_bytes",
    ("cdc/service/log_status_records.py", "held"): "`holds_bytes` is a JSON field",
    ("cdc/service/log_status_reader.py", "held"): "`holds_bytes` is a JSON field",
    ("cdc/service/page/templates/log.html", "held"): "`holds_bytes` is a JSON field",
    ("cdc/command_output.py", "flaw"): "`flaws` is a JSON field",
    ("config/shop.yaml", "beside"): "`snapshot.beside` is a key of definitions",
    ("deploy/RUNBOOK.md", "held"): "names of metrics",
    ("deploy/guides/monitor.md", "held"): "names of metrics",
    ("deploy/prometheus/cdc.rules.yml", "held"): "names of metrics",
    ("deploy/reference/definition.md", "beside"): "`snapshot.beside` is a key of definitions",
    ("deploy/reference/metrics.md", "held"): "names of metrics",
    ("pipelines/__main__.py", "flaw"): "a field of the JSON output",
    ("cdc/demo/sink_steps.py", "goes on"): "`others_go_on`, a field of the demo's JSON",
    ("cdc/demo/sink_steps.py", "mend"): "`mended`, a field of the demo's JSON",
    ("migrations/source/install.sql", "tell"): "names of dropped functions of earlier versions",
    ("migrations/source/remove.sql", "tell"): "names of dropped functions of earlier versions",
}
"""(path, word) → why the word is right there."""


def found_in(text: str) -> set[str]:
    spaced = text.replace("_", " ").lower()
    if not re.search(rf"\b(?:{'|'.join(WORDS.values())})\b", spaced):
        return set()  # most files, after one search instead of one a word
    return {word for word, spelled in WORDS.items() if re.search(rf"\b(?:{spelled})\b", spaced)}


def product_files() -> list[str]:
    folders = ("cdc", "pipelines", "migrations", "deploy", "config")
    files = [ROOT / "README.md", *(path for folder in folders for path in sorted((ROOT / folder).rglob("*")))]
    return [
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.suffix in ENDINGS and not {"__pycache__", "static"} & set(path.parts)
    ]


@pytest.fixture(scope="module", name="offenders")
def _offenders() -> dict[str, set[str]]:
    """The words that each file has and that are not right there."""
    found = {path: found_in((ROOT / path).read_text(encoding="utf-8")) for path in product_files()}
    return {path: left for path, words in found.items() if (left := {w for w in words if (path, w) not in RIGHT})}


def test_no_file_has_a_word_to_avoid(offenders: dict[str, set[str]]) -> None:
    assert offenders == {}


def test_every_exception_is_needed() -> None:
    unneeded = [(path, word) for path, word in RIGHT if word not in found_in((ROOT / path).read_text(encoding="utf-8"))]

    assert unneeded == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("what the log holds", {"held"}),
        ("def told_of(x)", {"tell"}),
        ("The index stands at 5.", {"stands at"}),
        ("the threshold of understanding", set()),
        ("brought by mistake", {"bring"}),
    ],
)
def test_words_are_found_as_words(text: str, words: set[str]) -> None:
    assert found_in(text) == words
