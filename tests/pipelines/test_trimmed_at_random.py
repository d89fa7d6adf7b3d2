"""Sinks over a log that is compacted and trimmed at any moment: they are as they would be without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from cdc.log import consumers
from cdc.log.consumers import Consumer
from cdc.position import Position
from pipelines.replaying.plan import ReplayOptions
from pipelines.replaying.replay import replay
from tests.pipelines.trimmed_log import KEEP, NOBODY, TrimmedAndWholeLog, apply_all, running_sink

SINKS = ("lake", "find")
SEEDS = [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]
"""The first takes every kind of step."""


class Story:
    """What happens to a pipeline, step by step."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.twins, self._random = TrimmedAndWholeLog(folder, seed), Random(seed)
        self.late = 0
        """Sinks that had to be built anew."""
        self._steps: list[Callable[[], object]] = [
            self._grow, self._grow, self._compact, self._bring_up, self._begin, self._build_anew, self._forget
        ]  # fmt: skip

    def step(self) -> None:
        """One of all that can happen."""
        self._random.choice(self._steps)()

    def brought_up(self, sink: str) -> None:
        """The sink at the log's end, by a replay where it is told so."""
        try:
            apply_all(self.twins.cut, sink)
        except AssertionError as told:
            assert "CDC-4004" in str(told)  # noqa: PT017 - what brought_up says of a sink that stopped
            self.late += 1
            assert replay(self.twins.cut.definition, ReplayOptions(sink=sink)).ok

    def _grow(self) -> None:
        self.twins.append(self._random.randint(1, 25), self._random.choice([1, 3, 7]))

    def _compact(self) -> None:
        self.twins.compact(self._random.choice([KEEP, NOBODY]))

    def _bring_up(self) -> None:
        self.brought_up(self._random.choice(SINKS))

    def _begin(self) -> None:
        with running_sink(self.twins.cut, self._random.choice(SINKS)) as query:
            query.step()

    def _build_anew(self) -> None:
        assert replay(self.twins.cut.definition, ReplayOptions(sink=self._random.choice(SINKS))).ok

    def _forget(self) -> None:
        for consumer in consumers.list_consumers(self.twins.root):
            consumers.forget(self.twins.root, consumer.uuid)
        consumers.register(self.twins.root, Consumer("other", "other", Position(self.twins.append(1))))


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_in_between_sinks_hold_what_those_of_the_whole_log_do(tmp_path: Path, seed: int) -> None:
    story = Story(tmp_path, seed)
    for _ in range(10):
        story.step()
    story.twins.append(2)
    for sink in SINKS:
        story.brought_up(sink)
        story.brought_up(sink)
        held = story.twins.cut.lake() if sink == "lake" else story.twins.cut.found()
        assert held == story.twins.expected(sink)
