"""The verb verify: options that conflict are refused before anything is opened; a verdict is printed in words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.__main__ import main
from pipelines.verification.command import verdict_text
from pipelines.verification.compare_table import TableVerdict


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--repair", "--against", "log"], "--repair cannot be combined with --against log"),
        (["--every", "1h", "--against", "log"], "--every cannot be combined with --against log"),
        (["--every", "soon"], "expected a duration"),
        (["--every", "0"], "expected at least 1s"),
        (["--every", "1h", "--rate=-5"], "--rate -5: expected at least 1"),
        (["--rate", "5"], "--rate requires --every"),
        (["--every", "1h", "--mode", "count"], "equal counts do not verify rows"),
        (["--sink", "nowhere"], "unknown sink 'nowhere'"),
        (["--sink", "nowhere", "--against", "log"], "unknown sink 'nowhere'"),
    ],
)
def test_conflicting_options_are_refused_before_anything_is_opened(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(
        "version: 1\nname: held\nsource: {dsn: 'postgresql://nobody@127.0.0.1:1/gone'}\n"
        f"tables: [{{match: 'public.*'}}]\nlog: {{path: '{tmp_path}/log'}}\n"
        f"sinks: [{{name: find, type: search, path: '{tmp_path}/find'}}]\n"
    )
    assert main(["verify", *options, "-c", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_an_unknown_mode_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["verify", "--mode", "guess"])
    assert refused.value.code == 2
    assert "'rows', 'checksum', 'count'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("verdict", "text"),
    [
        ({"equal": True, "compared": True, "rows": 1200, "target_rows": 1200}, "1,200 rows equal"),
        (
            {"equal": True, "compared": True, "rows": 3, "mode": "checksum", "parked": 1},
            "3 rows equal by digest, 1 keys parked",
        ),
        ({"equal": True, "compared": True, "rows": 3, "mode": "count"}, "3 rows expected and in the target"),
        (
            {"equal": False, "compared": True, "rows": 3, "target_rows": 2, "mode": "count"},
            "3 rows expected, 2 in the target",
        ),
        (
            {
                "equal": False,
                "compared": True,
                "rows": 3,
                "complete": False,
                "counts": {"missing": 2, "extra": 0, "differing": 1},
            },
            "3 rows, at least 2 missing, 1 differing",
        ),
        (
            {"equal": False, "state": "absent", "reason": "the sink has not published the table"},
            "absent, the sink has not published the table",
        ),
    ],
)
def test_a_verdict_is_described_by_its_counts(verdict: dict[str, Any], text: str) -> None:
    assert verdict_text(TableVerdict(sink="lake", topic="shop.orders", **verdict)) == text
