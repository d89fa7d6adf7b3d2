"""`python -m tests.benchmarks NAME [--json] [--quick]`: one benchmark with its comparison in the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from tests.benchmarks.figures import machine, print_json, print_table

NAMES = ("capture", "snapshot", "log", "apply", "freshness", "cost", "search", "delivery", "views", "scale")
SIZES = {
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
    runs, figures = benchmark.run(quick=asked.quick, **sizes)
    (print_json if asked.json else print_table)(asked.name, machine(), runs, figures)
    return 4 if any(figure.holds is False for figure in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
