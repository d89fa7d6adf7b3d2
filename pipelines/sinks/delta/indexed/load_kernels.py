"""Compiling or loading the numba functions of the key index that a new target needs.

Compiling takes two seconds of CPU, once per machine; loading takes half a second in a new interpreter. So an apply
process does it while it waits for the change log, and the warm process before it forks the apply process.
"""

from __future__ import annotations

from contextlib import suppress

import pyarrow as pa

from cdc.cached_njit import FunctionNotCached, only_cached
from pipelines.sinks.delta.indexed.key_hashes import hash_keys
from pipelines.sinks.delta.indexed.key_index import KeyIndex


def load_cached_kernels() -> None:
    """Load the functions that numba's cache contains, and compile none."""
    with only_cached(), suppress(FunctionNotCached):
        load_kernels()


def load_kernels() -> None:
    """Load the functions, or compile those that numba's cache does not contain."""
    hashes, rows = hash_keys([pa.array(["any"])], bytes(16))
    index = KeyIndex(None, "any")
    for name in ("first", "second"):  # the second run is merged with the first
        index.add({name: (hashes, rows)})
    index.find(hashes)
    index.close()
