"""The script that spark-submit runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdc.log.compacted_table import read_compacted_state
from tests.pipelines.cold_log import EACH_OF_ITS_OWN
from tests.pipelines.shop_pipeline import END, ShopPipeline, make_shop
from tests.pipelines.submitted.test_replay_progress import submit


@pytest.fixture
def ground(tmp_path: Path) -> ShopPipeline:
    """A log of several segments."""
    return make_shop(tmp_path, EACH_OF_ITS_OWN)


@pytest.mark.slow
def test_a_submitted_compaction_compacts_the_log(ground: ShopPipeline) -> None:
    done = submit(ground, "compact", "--all")
    assert done.status == 0, done.errors

    state = read_compacted_state(ground.definition.log.root)
    assert state is not None
    assert state.horizon == END
