"""`python -m tests.benchmarks NAME [--json] [--quick]`: one benchmark with its comparison in the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import Any

from tests.benchmarks.figures import machine, print_json, print_table

NAMES = ("capture", "snapshot")


def main() -> int:
    """Exit status 0 when every bar holds, 4 when one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--quick", action="store_true", help="a smaller run of at most 60 s with the same keys")
    own = parser.add_argument_group("snapshot only")
    own.add_argument("--rows", type=int, help="of the table; default 5,000,000")
    own.add_argument("--runs", type=int, help="default 3")
    own.add_argument("--parts", nargs="+", choices=("copy", "stream", "replay"), help="only these; default all")
    asked = parser.parse_args()
    sizes: dict[str, Any] = {name: found for name in ("rows", "runs", "parts") if (found := getattr(asked, name))}
    if sizes and asked.name != "snapshot":
        parser.error(f"{asked.name} takes no {', '.join(f'--{name}' for name in sizes)}")
    runs, figures = import_module(f"tests.benchmarks.{asked.name}").run(quick=asked.quick, **sizes)
    (print_json if asked.json else print_table)(asked.name, machine(), runs, figures)
    return 4 if any(figure.holds is False for figure in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
