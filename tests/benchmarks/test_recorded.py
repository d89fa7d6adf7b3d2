"""Recorded figures: what a run replaces, and how pages quote them."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.figures import Figure
from tests.benchmarks.recorded import Origin, quoted_keys, read, record, with_figures
from tests.reference import ROOT, pages_with_figures

FIRST = Origin("2026-01-01", "0123456789", "2 cores, 23.5 GiB of memory, a CPU", "python -m tests.benchmarks apply")
LATER = Origin("2026-02-01", "9876543210", "2 cores, 23.5 GiB of memory, a CPU", "python -m tests.benchmarks apply")
PAGE = """It takes <!-- figure apply/merge_ms -->9 ms<!-- end figure --> for a batch.
<!-- figures of apply -->
<!-- end figures -->
"""


@pytest.fixture(name="file")
def _file(tmp_path: Path) -> Path:
    file = tmp_path / "figures.json"
    file.write_text("{}")
    figures = {
        "merge_ms": Figure("ms", at_most=20, values=[12.0, 15.04, 31.0]),
        "rate": Figure("changes/s", at_least=100_000, values=[80_000.0]),
        "unmeasured": Figure("ms"),
    }
    record("apply", figures, FIRST, file)
    return file


def test_a_later_run_replaces_the_figures_that_it_measured_and_no_others(file: Path) -> None:
    record("apply", {"merge_ms": Figure("ms", at_most=20, values=[8.0]), "rate": Figure("changes/s")}, LATER, file)

    figures = read(file)

    assert set(figures) == {"apply/merge_ms", "apply/rate"}
    assert (figures["apply/merge_ms"].median, figures["apply/merge_ms"].origin) == (8.0, LATER)
    assert (figures["apply/rate"].median, figures["apply/rate"].origin) == (80_000.0, FIRST)


def test_a_page_quotes_the_median_with_its_unit_whatever_it_quoted_before(file: Path) -> None:
    page = with_figures(PAGE, read(file))

    assert "It takes <!-- figure apply/merge_ms -->15 ms<!-- end figure --> for a batch." in page
    assert with_figures(page, read(file)) == page


def test_a_table_says_value_spread_limit_commit_machine_date_and_command(file: Path) -> None:
    page = with_figures(PAGE, read(file))

    assert (
        "Measured on 2026-01-01 at commit `0123456789` by `python -m tests.benchmarks apply`: 2 cores, 23.5 GiB of "
        "memory, a CPU."
    ) in page
    assert "| `merge_ms` | 15 ms | 12 … 31 | ≤ 20 | kept |" in page
    assert "| `rate` | 80,000 changes/s | one run | ≥ 100,000 | **missed** |" in page


def test_a_figure_without_a_recorded_value_is_not_quoted_with_one() -> None:
    page = with_figures(PAGE, {})

    assert "<!-- figure apply/merge_ms -->(not yet measured)<!-- end figure -->" in page
    assert "No values are recorded" in page


@pytest.mark.parametrize("page", pages_with_figures())
def test_a_page_shows_the_recorded_figures(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert with_figures(text, read()) == text, "run: python -m tests.reference"


def test_every_recorded_or_quoted_figure_is_one_that_its_benchmark_measures() -> None:
    measured = {f"{name}/{key}" for name in NAMES for key in import_module(f"tests.benchmarks.{name}").empty_figures()}
    quoted = {key for page in pages_with_figures() for key in quoted_keys((ROOT / page).read_text(encoding="utf-8"))}

    assert set(read()) | quoted <= measured
