"""The second stage of `.ci/run`: the slow tests of what a change touches, and a share of the others, in bounded time.

`python -m tests.slow_stage END` runs them until END, a Unix time. All slow tests together take hours. Each day has
another share of them, so that SHARES days in a row run every one. The change is what differs from the commit in the
variable CDC_CI_BASE; if it is not set, from where the branch left `main`, or, on `main`, from the commit before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Final

from tests.source_tree import ROOT, modules

SHARES: Final = 30
MAIN: Final = ("origin/main", "main")
NOTHING_COLLECTED: Final = 5
"""Exit status of pytest if no test is chosen."""


def touched_tests(changed: Iterable[str]) -> list[str]:
    """Return the test files that changed, or import what changed, directly or by way of helpers of tests.

    changed: paths under the project's root.
    """
    helpers = {module.name: module for module in modules("tests")}
    names = {".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__") for path in changed}

    def reached(name: str) -> set[str]:
        """The module, and what it imports, also by way of helpers."""
        found, waiting = {name}, [name]
        while waiting:
            new = helpers[waiting.pop()].imports - found
            found |= new
            waiting += new & helpers.keys()
        return found

    files = {module.place: name for name, module in helpers.items() if module.path.name.startswith("test_")}
    return sorted(place for place, name in files.items() if names & reached(name))


def changed_files() -> tuple[str, list[str]]:
    """Return the commit before the change, and the files that differ from it; no file if there is no such commit."""
    base = os.environ.get("CDC_CI_BASE") or _commit_before()
    return base, _git("diff", "--name-only", base, "--", "*.py").splitlines() if base else []


def _commit_before() -> str:
    head = _git("rev-parse", "HEAD")
    left = [_git("merge-base", "HEAD", branch) for branch in MAIN]
    return next((commit for commit in left if commit not in {"", head}), _git("rev-parse", "HEAD~1"))


def _git(*command: str) -> str:
    """Return what git prints; nothing if it fails."""
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def main(end: str) -> int:
    """Print what is chosen and run it; return the exit status of pytest."""
    base, changed = changed_files()
    touched = touched_tests(changed)
    number = datetime.now(UTC).date().toordinal() % SHARES
    sys.stdout.write(f"changed since {base[:12] or 'no known commit'}: {len(changed)} Python files\n")
    sys.stdout.writelines(f"  touched: {file}\n" for file in touched)
    sys.stdout.write(f"and of the other slow tests those of share {number} of {SHARES}, the one of today\n")
    sys.stdout.flush()
    chosen = [f"--share={number}/{SHARES}", *(f"--whole={file}" for file in touched), f"--end={end}"]
    command = [sys.executable, "-m", "pytest", "-m", "slow", "-rs", "--durations=20", "--no-loadscope-reorder", *chosen]
    status = subprocess.run(command, cwd=ROOT, check=False).returncode
    return 0 if status == NOTHING_COLLECTED else status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
