"""FrameBatch: the CopyData payloads of one read, joined into one buffer with offsets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class FrameBatch:
    """Whole `w` and `k` frames, as the walsender sent them and in its order; no object per frame."""

    buffer: np.ndarray
    """uint8, C-contiguous."""
    offsets: np.ndarray
    """int64, one more than there are frames; frame i is `buffer[offsets[i]:offsets[i + 1]]`."""

    @classmethod
    def of(cls, frames: Sequence[bytes]) -> Self:
        """Join frames; copies them once."""
        offsets = np.zeros(len(frames) + 1, np.int64)
        np.cumsum([len(frame) for frame in frames], out=offsets[1:])
        return cls(np.frombuffer(b"".join(frames), np.uint8), offsets)

    @property
    def nbytes(self) -> int:
        """Bytes of all frames."""
        return int(self.offsets[-1] - self.offsets[0])

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> bytes:
        if not 0 <= index < len(self):
            raise IndexError(f"no such frame: expected 0 to {len(self) - 1}, got {index}")
        return self.buffer[self.offsets[index] : self.offsets[index + 1]].tobytes()

    def __iter__(self) -> Iterator[bytes]:
        return (self[index] for index in range(len(self)))
