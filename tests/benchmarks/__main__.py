"""`python -m tests.benchmarks NAME [--json] [--quick]`: one benchmark with its comparison in the same run."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

from tests.benchmarks.figures import machine, print_json, print_table

NAMES = ("capture",)


def main() -> int:
    """Exit status 0 when every bar holds, 4 when one does not."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks")
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--json", action="store_true", help="one object on the last line")
    parser.add_argument("--quick", action="store_true", help="a smaller run of at most 60 s with the same keys")
    asked = parser.parse_args()
    runs, figures = import_module(f"tests.benchmarks.{asked.name}").run(quick=asked.quick)
    (print_json if asked.json else print_table)(asked.name, machine(), runs, figures)
    return 4 if any(figure.holds is False for figure in figures.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
