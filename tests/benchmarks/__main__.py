"""`python -m tests.benchmarks NAME [--json] [--quick] [--record]`: a benchmark and its peers in the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from tests.benchmarks.figures import machine, print_json, print_table
from tests.benchmarks.recorded import Origin, changed_files, record

NAMES = ("capture", "snapshot", "log", "apply", "freshness", "cost", "search", "delivery", "views", "scale", "start")
SIZES = {
    "capture": ("runs", "parts"),
    "start": ("runs", "parts"),
    "snapshot": ("rows", "runs", "parts"),
    "log": ("changes", "keys", "commits", "runs", "parts"),
    "apply": ("changes", "keys", "rows", "runs", "parts"),
    "freshness": ("rows", "seconds", "runs", "parts"),
    "cost": ("seconds", "runs", "parts"),
    "search": ("rows", "seconds", "runs", "parts"),
    "delivery": ("changes", "runs", "parts"),
    "views": ("rows", "seconds", "runs", "parts"),
    "scale": ("changes", "rows", "runs", "parts"),
}


def main() -> int:
    """Exit status 0 when every bar holds, 4 when one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--quick", action="store_true", help="a smaller run of at most 60 s with the same keys")
    parser.add_argument("--record", action="store_true", help="replace the values in figures.json by those of this run")
    own = parser.add_argument_group("of some benchmarks")
    own.add_argument(
        "--rows",
        type=int,
        help="of the table; snapshot: 5,000,000, apply: 50,000,000, freshness and search: 1,000,000; "
        "views: 10,000,000; scale: 50,000,000",
    )
    own.add_argument(
        "--changes",
        type=int,
        help="log: 20,000,000, of which 10,000,000 are appended; apply: 5,000,000; scale: 20,000,000; "
        "delivery: 1,000,000",
    )
    own.add_argument("--commits", type=int, help="log: after which appending is measured again; default 100,000")
    own.add_argument("--keys", type=int, help="that they are spread over; log: 2,000,000, apply: 500,000")
    own.add_argument("--seconds", type=float, help="of load; freshness, search, views: 60; cost: 40 for each rate")
    own.add_argument("--runs", type=int, help="default 3")
    own.add_argument("--parts", nargs="+", help="only these of its PARTS; default all")
    asked = parser.parse_args()
    given = {name for names in SIZES.values() for name in names if getattr(asked, name)}
    foreign = [f"--{name}" for name in sorted(given - set(SIZES.get(asked.name, ())))]
    benchmark = import_module(f"tests.benchmarks.{asked.name}")
    parts = getattr(benchmark, "PARTS", ())
    foreign += sorted(set(asked.parts or ()) - set(parts))
    if foreign:
        parser.error(f"{asked.name} takes no {', '.join(foreign)}; its parts: {', '.join(parts) or 'none'}")
    sizes: dict[str, Any] = {name: getattr(asked, name) for name in given}
    if asked.record and (why := _why_not_recorded(asked.quick, given)):
        parser.error(f"--record: {why}")
    runs, figures = benchmark.run(quick=asked.quick, **sizes)
    (print_json if asked.json else print_table)(asked.name, machine(), runs, figures)
    if asked.record:
        words = [word for word in sys.argv[1:] if word not in {"--record", "--json"}]
        record(asked.name, figures, Origin.of_run(machine(), " ".join(["python -m tests.benchmarks", *words])))
    return 4 if any(figure.holds is False for figure in figures.values()) else 0


def _why_not_recorded(quick: bool, given: set[str]) -> str:
    """Return why the values of a run would not be what their names say; empty if they are."""
    if quick or given - {"runs", "parts"}:
        return "the figures are those of a run of full size: omit --quick and other sizes"
    files = changed_files()
    return f"the values belong to a commit: commit first {', '.join(files)}" if files else ""


if __name__ == "__main__":
    sys.exit(main())
