"""Settings: what a reader takes from a definition."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.capture.settings import ReaderSettings, reader_settings
from tests.faults.capture import Captured

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


def settings_with(folder: Path, more: str = "") -> ReaderSettings:
    definition = Captured(folder, NOWHERE, slot="cdc_settings")
    with definition.path.open("a") as file:
        file.write(more)
    return reader_settings(definition.definition)


def test_settings_name_slot_log_and_tables_of_the_definition(tmp_path: Path) -> None:
    settings = settings_with(tmp_path)

    assert (settings.source.slot, settings.log) == ("cdc_settings", tmp_path / "log")
    assert (list(settings.source.patterns), settings.source.create_slot) == (["public.*"], True)
    assert settings.retention is not None


@pytest.mark.parametrize(("mode", "copies"), [("initial", True), ("initial_only", True), ("no_data", False)])
def test_only_the_mode_without_data_copies_no_rows(tmp_path: Path, mode: str, copies: bool) -> None:
    assert settings_with(tmp_path, f"snapshot: {{mode: {mode}}}\n").source.copies_rows is copies
