"""The key `verify`: off, an interval, a budget, and hours of the day."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from cdc.config import load_definition
from cdc.config.verification import Verification
from cdc.errors import InvalidDefinition


def load(folder: Path, lines: str) -> Verification:
    file = folder / "cdc.yaml"
    file.write_text(
        "name: a\nsource: {dsn: 'postgresql://u@h/d'}\ntables: [{match: 'a.*'}]\nlog: {path: ./log}\n" + lines
    )
    return load_definition(file).verify


@pytest.mark.parametrize(
    ("lines", "every"), [("", 86400), ("verify: off", 0), ("verify: {every: off}", 0), ("verify: {every: 1h}", 3600)]
)
def test_it_is_on_unless_it_is_turned_off(tmp_path: Path, lines: str, every: float) -> None:
    assert load(tmp_path, lines).every == every


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("verify: {evry: 1h}", 'verify.evry: unknown key — did you mean "every"'),
        ("verify: {max_cpu: 2}", "verify.max_cpu: expected at most 1"),
        ("verify: {between: 1-5}", "verify.between: expected two times of the day in UTC"),
        ("verify: {between: '01:00-01:00'}", "verify.between: the two times are equal"),
        ("verify: sometimes", "verify: expected a mapping"),
    ],
)
def test_an_error_names_the_key(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(InvalidDefinition, match=message.replace("(", r"\(")):
        load(tmp_path, lines)


def test_hours_may_include_midnight() -> None:
    def open_hours(between: str) -> list[int]:
        settings = Verification(between=between)
        return [hour for hour in range(24) if settings.is_open(datetime(2026, 1, 1, hour, 30, tzinfo=UTC))]

    assert open_hours("01:00-03:30") == [1, 2]
    assert open_hours("22:00-02:31") == [0, 1, 2, 22, 23]
    assert len([hour for hour in range(24) if Verification().is_open(datetime(2026, 1, 1, hour, tzinfo=UTC))]) == 24
