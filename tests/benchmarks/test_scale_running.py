"""A backlog aside: what a reader of the log sees before and after it appears."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cdc.log.reader import LogReader
from tests.benchmarks.apply_input import Changes
from tests.benchmarks.scale_running import backlog_aside


def test_a_reader_sees_the_first_rows_and_then_the_backlog(tmp_path: Path) -> None:
    changes = Changes.random(np.random.default_rng(0), 10, 20)
    log = changes.log(tmp_path, commit=10)

    with backlog_aside(log, tmp_path / "aside") as show:
        reader = LogReader(log)
        before = reader.durable
        show()
        reader.refresh()
        after = reader.durable

    assert before == changes.position(0)
    assert after == changes.position(29)


def test_the_log_is_whole_again_after_an_error(tmp_path: Path) -> None:
    changes = Changes.random(np.random.default_rng(0), 10, 20)
    log = changes.log(tmp_path, commit=10)

    with pytest.raises(OSError, match="full"), backlog_aside(log, tmp_path / "aside"):
        raise OSError("full")

    assert LogReader(log).durable == changes.position(29)


def test_a_log_with_a_checkpoint_has_no_first_commits(tmp_path: Path) -> None:
    log = Changes.random(np.random.default_rng(0), 10, 590).log(tmp_path, commit=10)

    with pytest.raises(RuntimeError, match="fewer commits"), backlog_aside(log, tmp_path / "aside"):
        pass
