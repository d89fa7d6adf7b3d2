"""Processes of the demo: their command lines and the last line of their output."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.demo.processes import last_line, pipelines_command


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("first\nlast\n\n", "last"),
        ("  indented  \n", "indented"),
        ("x" * 500, "x" * 200),
        ("\n", "the process printed nothing"),
        (None, "the process printed nothing"),
    ],
)
def test_the_last_line_of_a_process_is_its_last_one_with_text(tmp_path: Path, output: str | None, line: str) -> None:
    if output is not None:
        (tmp_path / "reader.out").write_text(output)

    assert last_line(tmp_path / "reader.out") == line


def test_a_command_of_pipelines_has_the_definition_before_its_options() -> None:
    command = pipelines_command("apply", Path("/state/shop.yaml"), "--sink", "lake")

    assert command[1:] == ["-m", "pipelines", "apply", "-c", "/state/shop.yaml", "--sink", "lake"]
