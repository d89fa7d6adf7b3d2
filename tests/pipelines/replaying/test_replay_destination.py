"""The new target of a replay: staged targets, and directories of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cdc.config import DeltaSinkDefinition
from cdc.errors import ConfigError, SinkFenced
from pipelines.replaying.replay_destination import check_directory, fill_directory
from pipelines.sinks.delta.kind import delta_settings
from pipelines.sinks.delta.staged_targets import StagedDelta
from tests.pipelines.shop_pipeline import applied_shop


def make_twice(folder: Path) -> None:
    """Make a folder, and fail."""
    folder.mkdir()
    folder.mkdir()


def test_a_folder_that_was_not_finished_belongs_to_its_replay_alone(tmp_path: Path) -> None:
    apart = str(tmp_path / "apart")
    half = tmp_path / "apart" / "half"
    with pytest.raises(FileExistsError), fill_directory(apart, "log/lake"):
        make_twice(half)
    with pytest.raises(ConfigError, match="is not empty"):
        check_directory(apart, "log/other")
    with fill_directory(apart, "log/lake"):
        assert not half.exists()
        (tmp_path / "apart" / "whole").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        check_directory(apart, "log/lake")


def test_a_driver_that_wrote_meanwhile_is_not_overwritten() -> None:
    shop = applied_shop(upto=1_200)
    lake = shop.definition.sinks[0]
    assert isinstance(lake, DeltaSinkDefinition)
    staged = StagedDelta(delta_settings(lake))
    log_id = shop.writer.log_id
    staged.sink.open(log_id)
    standing = staged.open_published(log_id)
    assert standing is not None
    shop.drive("lake")
    with pytest.raises(SinkFenced):
        staged.put(replace(standing, tables={}), standing.tables)
    assert shop.lake()["shop.items"][-1]["note"] == "too"
