"""Which slow tests the second stage of `.ci/run` chooses, and that it ends in time."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fixtures.skips import NO_TIME
from tests.fixtures.slow_share import share_of
from tests.slow_stage import SHARES, touched_tests
from tests.source_tree import ROOT

TESTS = """
import pytest

@pytest.mark.parametrize("number", range(20))
def test_of_many(number): pass

@pytest.mark.timeout(3_000)
def test_that_may_take_long(): pass
"""


@pytest.mark.parametrize(
    ("changed", "touched"),
    [
        ("tests/log/test_writer.py", "tests/log/test_writer.py"),
        ("cdc/log/writer.py", "tests/log/test_writer.py"),
        ("tests/faults/capture.py", "tests/faults/test_failover.py"),
        ("cdc/pgoutput/__init__.py", "tests/pgoutput/test_kernel.py"),
    ],
)
def test_a_change_touches_the_tests_that_import_it_themselves_or_by_helpers(changed: str, touched: str) -> None:
    assert touched in touched_tests([changed])


def test_a_change_touches_no_other_test() -> None:
    assert touched_tests(["tests/log/test_writer.py"]) == ["tests/log/test_writer.py"]
    assert touched_tests(["README.md"]) == []
    assert "tests/view_sql/test_join_graph.py" not in touched_tests(["cdc/log/writer.py"])


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\ntimeout = 300\nmarkers = slow\n")
    (tmp_path / "test_some.py").write_text(TESTS)
    return tmp_path


def passed(folder: Path, *options: str) -> list[str]:
    """Run pytest over the tests above until 2,000 seconds from now; return the tests that passed."""
    command = [sys.executable, "-m", "pytest", "-c", folder / "pytest.ini", "-p", "tests.fixtures.slow_share"]
    arguments = ["-p", "no:randomly", "-p", "no:cacheprovider", "-rs", "-v", f"--end={time.time() + 2_000}", *options]
    words = [str(word) for word in (*command, *arguments, folder)]
    printed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert ("test_that_may_take_long SKIPPED" in printed) == (NO_TIME in printed)
    return [line.split()[0].rpartition("/")[2] for line in printed.splitlines() if " PASSED" in line]


def test_the_tests_of_a_share_run_that_end_in_time_whatever_they_do(folder: Path) -> None:
    tests = [f"test_some.py::test_of_many[{number}]" for number in range(20)]
    share = [test for test in tests if share_of(test, 2) == 0]
    assert 0 < len(share) < len(tests)
    assert passed(folder, "--share=0/2") == share


def test_of_a_touched_file_every_test_runs(folder: Path) -> None:
    assert len(passed(folder, "--share=0/2", "--whole=test_some.py")) == 20


def test_every_test_is_in_the_share_of_one_day() -> None:
    shares = [share_of(f"tests/test_x.py::test_{number}", SHARES) for number in range(1_000)]
    assert {*shares} == {*range(SHARES)}
