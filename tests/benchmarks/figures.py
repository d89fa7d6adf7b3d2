"""Figures: measured values with their unit and bar, and how they are printed."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any


@dataclass(slots=True)
class Figure:
    """One figure over all runs."""

    unit: str
    at_least: float | None = None
    at_most: float | None = None
    values: list[float] = field(default_factory=list)
    in_every_run: bool = False
    """Whether each value has to keep the bar, and not the median alone."""

    @property
    def holds(self) -> bool | None:
        """Whether the bar is kept; None without a bar or without a value."""
        if not self.values or (self.at_least is None and self.at_most is None):
            return None
        if self.at_least is not None:
            return (min if self.in_every_run else median)(self.values) >= self.at_least
        return (max if self.in_every_run else median)(self.values) <= float(self.at_most or 0)

    @property
    def limit(self) -> str:
        """The limit as text, `≥ 2.5` or `≤ 60`; empty without one."""
        if self.at_least is not None:
            return f"≥ {self.at_least:,.10g}"
        return "" if self.at_most is None else f"≤ {self.at_most:,.10g}"

    def to_json(self) -> dict[str, Any]:
        """Median, least and greatest value, unit, bar, verdict."""
        known = bool(self.values)
        return {
            "median": round(median(self.values), 4) if known else None,
            "min": round(min(self.values), 4) if known else None,
            "max": round(max(self.values), 4) if known else None,
            "unit": self.unit,
            "bar": self.at_least if self.at_least is not None else self.at_most,
            "holds": self.holds,
        }


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def print_json(name: str, place: Mapping[str, Any], runs: int, figures: Mapping[str, Figure]) -> None:
    """One object on the last line."""
    shown = {key: figure.to_json() for key, figure in figures.items()}
    print(json.dumps({"benchmark": name, "machine": place, "runs": runs, "figures": shown}), flush=True)


def print_table(name: str, place: Mapping[str, Any], runs: int, figures: Mapping[str, Figure]) -> None:
    """A line per figure."""
    print(f"{name}: {runs} runs on {place['cores']} cores, {place['cpu']}")
    marks = {True: "holds", False: "FAILS", None: ""}
    for key, figure in figures.items():
        f = figure.to_json()
        if f["median"] is None:
            print(f"  {key:36} not measured")
            continue
        bar = "" if f["bar"] is None else f"bar {f['bar']}"
        print(
            f"  {key:36} {f['median']:>14,} {f['unit']:10} ({f['min']:,} … {f['max']:,}) {bar:10} {marks[f['holds']]}"
        )
