"""Secrets: read by a reference, never printed, read again from their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from cdc.config.interpolation import Interpolated
from cdc.config.secret import HIDDEN, Secret


def read(value: Any, directory: Path | None = None, environment: dict[str, str] | None = None) -> Secret:
    """The secret that validation makes of a value of a definition."""
    context = {"directory": directory or Path(), "environment": environment or {}, "advice": []}
    return TypeAdapter(Secret).validate_python(value, context=context)


def test_a_secret_shows_its_reference_and_reveals_its_value_on_request() -> None:
    for secret in (read(Interpolated.of("hidden", "${A}")), read({"env": "A"}, environment={"A": "hidden"})):
        assert secret.reveal() == "hidden"
        assert "hidden" not in f"{secret!r} {secret.reference} {secret.portable_reference}"
    assert read("literal").reference == HIDDEN


def test_a_secret_file_is_read_again_and_a_broken_one_keeps_the_last_value(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text("one\n")
    secret = read({"file": "password"}, tmp_path)
    assert secret.reveal() == "one"

    file.write_text("two\n")
    assert (secret.current(), secret.reread(), secret.reveal()) == ("two", "two", "one")
    file.unlink()
    assert (secret.current(), secret.reread()) == ("one", None)
    assert secret.portable_reference == {"file": str(file)}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"env": "NONE"}, "variable 'NONE' is not set"),
        ({"file": "none"}, "secret file cannot be read"),
        ({"vault": "x"}, "expected ..VAR."),
        (["x"], "expected ..VAR."),
        ({"env": "SPACE"}, "begins or ends with white space"),
        ({"env": "BREAK"}, "a line break or another control character"),
    ],
)
def test_an_unusable_reference_is_an_error(value: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        read(value, tmp_path, {"SPACE": " x", "BREAK": "a\tb"})
