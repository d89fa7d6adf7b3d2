"""Arrays that the kernels read and fill: log rows under construction, layouts, one tuple."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Texts(NamedTuple):
    """One nested column (list or map of text) under construction."""

    ends: np.ndarray
    """int32, rows + 1: end offset of each row's children."""
    valid: np.ndarray
    """uint8 per row: 0 is null."""
    ids: np.ndarray
    """int32 per child: column id; the key of a map, unused in a list."""
    offsets: np.ndarray
    """int32, children + 1."""
    present: np.ndarray
    """uint8 per child: 0 is null."""
    text: np.ndarray
    """uint8, UTF-8."""
    used: np.ndarray
    """int64: children, bytes."""


class Rows(NamedTuple):
    """Columns of log rows under construction; Python code fills payload and address."""

    position: np.ndarray
    ordinal: np.ndarray
    xid: np.ndarray
    committed_at: np.ndarray
    relation: np.ndarray
    """int64; below 0 is null."""
    topic: np.ndarray
    """int32: index of the topic; below 0 is null."""
    op: np.ndarray
    """int8: index in OPERATIONS."""
    partial: np.ndarray
    """uint8."""
    key: Texts
    old_key: Texts
    before: Texts
    after: Texts


class Layouts(NamedTuple):
    """All defined layouts, sorted by OID; index i of the first arrays is one relation."""

    oid: np.ndarray
    relation: np.ndarray
    topic: np.ndarray
    first: np.ndarray
    """int64, n + 1: start of its columns in `ids` and `is_key`."""
    key_first: np.ndarray
    """int64, n + 1: start of its key in `keys`."""
    ids: np.ndarray
    is_key: np.ndarray
    keys: np.ndarray
    """int64: tuple indices of the key columns, in key order."""


class Values(NamedTuple):
    """Values of one tuple: kind, and offset and size of the text in the frame buffer."""

    kind: np.ndarray
    at: np.ndarray
    size: np.ndarray
