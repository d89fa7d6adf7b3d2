"""However a log is cut into batches, and whichever of them come again, a target ends as its mode's model says.

Known gap: a range that ends before columns which an earlier attempt gave the target, and gave no rows yet.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random

import pytest

from cdc.config.delta_sink import HistoryMode
from tests.contracts.histories import ALL_SETTINGS, MODELS, Lake, kept
from tests.contracts.stories import Story, drive, evolving, log, ruled


def _same(random: Random) -> Story:
    rows = log(random)
    return Story(rows, rows)


STORIES: dict[str, Callable[[Random], Story]] = {
    "the same columns": _same,
    "changed columns": lambda random: evolving(log(random), random),
    "changed columns under a rule": lambda random: ruled(evolving(log(random), random)),
}
OVER_A_NEW_COLUMN = {**dict.fromkeys(ALL_SETTINGS, 18), HistoryMode.VERSIONS: 0}
"""The seeds where a driver dies in the range that brings a new column to a target with rows."""


def _is_quick(keeping: HistoryMode, name: str, seed: int) -> bool:
    return seed == (OVER_A_NEW_COLUMN[keeping] if name == "changed columns" else 0)


@pytest.mark.parametrize(
    ("keeping", "name", "seed"),
    [
        pytest.param(*case, marks=() if _is_quick(*case) else pytest.mark.slow)
        for case in product(ALL_SETTINGS, STORIES, range(30))
    ],
)
def test_any_batches_of_a_log_and_any_of_them_again_give_the_same_table(
    tmp_path: Path, keeping: HistoryMode, name: str, seed: int
) -> None:
    random = Random(f"{keeping} {name} {seed}")
    story = STORIES[name](random)
    lake = Lake(str(tmp_path), ALL_SETTINGS[keeping], rules=story.rules)
    drive(lake, story, random)

    assert kept(lake, keeping, story.shown) == MODELS[keeping](story.told, story.shown)
