"""Recorded figures: the values of complete runs in `figures.json`, from which all pages quote.

`python -m tests.benchmarks NAME --record` replaces the values that it measured. `python -m tests.reference` writes them
into the pages: a table for each benchmark in figures.md, and single values between a marker and its end mark, as in
`<!-- figure capture/lag_p50_ms -->36 ms<!-- end figure -->`.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final, Self

from tests.benchmarks.figures import Figure

ROOT: Final = Path(__file__).resolve().parent.parent.parent
RECORD: Final = Path(__file__).with_name("figures.json")
UNMEASURED: Final = "(not yet measured)"
_QUOTE: Final = re.compile(r"(<!-- figure ([\w./]+) -->).*?(<!-- end figure -->)", re.DOTALL)
_TABLES: Final = re.compile(r"(<!-- figures of (\w+) -->\n).*?(<!-- end figures -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Origin:
    """When, where and how figures were measured."""

    date: str
    commit: str
    machine: str
    command: str

    @classmethod
    def of_run(cls, machine: Mapping[str, Any], command: str) -> Self:
        """Return the origin of figures that this checkout measures today."""
        cores_and_memory = f"{machine['cores']} cores, {machine['memory_gib']} GiB of memory, {machine['cpu']}"
        return cls(f"{datetime.now(UTC):%Y-%m-%d}", _git("rev-parse", "--short=10", "HEAD"), cores_and_memory, command)


@dataclass(frozen=True, slots=True)
class RecordedFigure:
    """The values of one figure over the runs of a benchmark."""

    median: float
    least: float
    greatest: float
    unit: str
    runs: int
    limit: str
    """`≥ 2.5` or `≤ 60`; empty without a limit."""
    holds: bool | None
    """Whether the limit is kept; None without a limit."""
    origin: Origin

    @classmethod
    def of(cls, figure: Figure, origin: Origin) -> Self:
        """Return what a figure with values says."""
        values = figure.to_json()
        return cls(
            values["median"],
            values["min"],
            values["max"],
            figure.unit,
            len(figure.values),
            figure.limit,
            figure.holds,
            origin,
        )

    @property
    def quoted(self) -> str:
        """The median with its unit."""
        return f"{number(self.median)} {self.unit}" if self.unit not in {"ratio", "x"} else number(self.median)


def changed_files() -> list[str]:
    """Return the files that differ from the commit, without what recording itself changes."""
    lines = _git("status", "--porcelain").splitlines()
    return [line for line in lines if not line.endswith((RECORD.name, ".md"))]


def read(file: Path = RECORD) -> dict[str, RecordedFigure]:
    """Return the recorded figures by `benchmark/key`."""
    entries = json.loads(file.read_text(encoding="utf-8"))
    return {key: RecordedFigure(**{**entry, "origin": Origin(**entry["origin"])}) for key, entry in entries.items()}


def record(benchmark: str, figures: Mapping[str, Figure], origin: Origin, file: Path = RECORD) -> None:
    """Replace the recorded values of the figures that have values; the others stay as they are."""
    measured = {
        f"{benchmark}/{key}": RecordedFigure.of(figure, origin) for key, figure in figures.items() if figure.values
    }
    entries = {key: asdict(figure) for key, figure in sorted({**read(file), **measured}.items())}
    file.write_text(json.dumps(entries, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def with_figures(text: str, figures: Mapping[str, RecordedFigure]) -> str:
    """Return the text of a page with the present values between its markers."""
    quoted = _QUOTE.sub(partial(_with_value, figures), text)
    return _TABLES.sub(partial(_with_tables, figures), quoted)


def quoted_keys(text: str) -> list[str]:
    """Return the keys of the single values that a page quotes."""
    return [match[2] for match in _QUOTE.finditer(text)]


def number(value: float) -> str:
    """Return a value with three digits, or as a whole number if it has more."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _with_value(figures: Mapping[str, RecordedFigure], match: re.Match[str]) -> str:
    figure = figures.get(match[2])
    return f"{match[1]}{UNMEASURED if figure is None else figure.quoted}{match[3]}"


def _with_tables(figures: Mapping[str, RecordedFigure], match: re.Match[str]) -> str:
    return match[1] + "\n".join(_tables(match[2], figures)) + "\n" + match[3]


def _tables(benchmark: str, figures: Mapping[str, RecordedFigure]) -> Iterator[str]:
    """Yield the lines of a table for each origin of the figures of a benchmark."""
    own = {key.partition("/")[2]: figure for key, figure in figures.items() if key.startswith(f"{benchmark}/")}
    if not own:
        yield f"\nNo values are recorded: {UNMEASURED}.\n"
    of_figure = lambda item: tuple(asdict(item[1].origin).values())  # noqa: E731 - the key of sorting and grouping
    for _, group in groupby(sorted(own.items(), key=of_figure), key=of_figure):
        rows = list(group)
        origin = rows[0][1].origin
        yield f"\nMeasured on {origin.date} at commit `{origin.commit}` by `{origin.command}`: {origin.machine}.\n"
        yield "| figure | median | least … greatest | limit | |"
        yield "|---|---|---|---|---|"
        for key, figure in sorted(rows):
            spread = f"{number(figure.least)} … {number(figure.greatest)}" if figure.runs > 1 else "one run"
            verdict = {True: "kept", False: "**missed**", None: ""}[figure.holds]
            yield f"| `{key}` | {number(figure.median)} {figure.unit} | {spread} | {figure.limit} | {verdict} |"
        yield ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
