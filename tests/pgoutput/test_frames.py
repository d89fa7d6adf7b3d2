"""A frame batch is a sequence of frames without an object for each."""

from __future__ import annotations

import pytest

from cdc.pgoutput.frames import FrameBatch


@pytest.mark.parametrize("frames", [[], [b""], [b"a", b"", b"bcd"]])
def test_a_batch_gives_its_frames_back(frames):
    batch = FrameBatch.of(frames)
    assert [batch[index] for index in range(len(batch))] == list(batch) == frames
    assert batch.nbytes == sum(map(len, frames))


@pytest.mark.parametrize("index", [-1, 1])
def test_a_frame_outside_the_batch_is_an_index_error(index):
    with pytest.raises(IndexError, match="expected 0 to 0"):
        FrameBatch.of([b"a"])[index]
